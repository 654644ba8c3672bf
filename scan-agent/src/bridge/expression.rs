//! Our filter as vortex's expression: columns are found, literals take the column's type.

use vortex::array::expr::{
    Expression, and, col, eq, gt, gt_eq, is_null, lit, lt, lt_eq, not, not_eq, or,
};
use vortex::array::scalar::{PValue, Scalar};
use vortex::dtype::half::f16;
use vortex::dtype::{DType, Nullability, PType};
use vortex::extension::datetime::{AnyTemporal, TimeUnit};

use crate::filter::{Column, Filter, FilterError, Literal, Operand, Operator, parse_instant};

/// The expression of `filter` over rows of type `scope`.
pub(super) fn compile(filter: &Filter, scope: &DType) -> Result<Expression, FilterError> {
    Ok(match filter {
        Filter::And(left, right) => and(compile(left, scope)?, compile(right, scope)?),
        Filter::Or(left, right) => or(compile(left, scope)?, compile(right, scope)?),
        Filter::Not(inner) => not(compile(inner, scope)?),
        Filter::IsNull(column) => {
            dtype_of(column, scope)?;
            is_null(col(column.name.as_str()))
        }
        Filter::IsTrue(column) => match dtype_of(column, scope)? {
            DType::Bool(_) => col(column.name.as_str()),
            other => {
                let message = format!("column {} is {other}, not bool", column.name);
                return Err(FilterError::new(column.position, message));
            }
        },
        Filter::Compare { operator, left, right } => compare(*operator, left, right, scope)?,
    })
}

fn compare(
    operator: Operator,
    left: &Operand,
    right: &Operand,
    scope: &DType,
) -> Result<Expression, FilterError> {
    let (left, right) = match (left, right) {
        (Operand::Column(a), Operand::Column(b)) => {
            let (left, right) = (dtype_of(a, scope)?, dtype_of(b, scope)?);
            if left.as_nonnullable() != right.as_nonnullable() {
                let message = format!("{} is {left} but {} is {right}", a.name, b.name);
                return Err(FilterError::new(b.position, message));
            }
            (col(a.name.as_str()), col(b.name.as_str()))
        }
        (Operand::Column(a), Operand::Literal(value, at)) => {
            let value = scalar(value, *at, &dtype_of(a, scope)?)?;
            (col(a.name.as_str()), lit(value))
        }
        (Operand::Literal(value, at), Operand::Column(b)) => {
            let value = scalar(value, *at, &dtype_of(b, scope)?)?;
            (lit(value), col(b.name.as_str()))
        }
        (Operand::Literal(..), Operand::Literal(_, at)) => {
            return Err(FilterError::new(*at, "a comparison needs a column"));
        }
    };
    let build = match operator {
        Operator::Eq => eq,
        Operator::NotEq => not_eq,
        Operator::Lt => lt,
        Operator::LtEq => lt_eq,
        Operator::Gt => gt,
        Operator::GtEq => gt_eq,
    };
    Ok(build(left, right))
}

fn dtype_of(column: &Column, scope: &DType) -> Result<DType, FilterError> {
    let fields = scope.as_struct_fields_opt();
    fields.and_then(|fields| fields.field(column.name.as_str())).ok_or_else(|| {
        let have: Vec<&str> = fields
            .map(|fields| fields.names().iter().map(AsRef::as_ref).collect())
            .unwrap_or_default();
        let message = format!("no column {}; there are {}", column.name, have.join(", "));
        FilterError::new(column.position, message)
    })
}

fn scalar(literal: &Literal, position: usize, dtype: &DType) -> Result<Scalar, FilterError> {
    let nullability = Nullability::NonNullable;
    let mismatch = || FilterError::new(position, format!("{literal:?} does not fit type {dtype}"));
    match (dtype, literal) {
        (DType::Bool(_), Literal::Bool(value)) => Ok(Scalar::bool(*value, nullability)),
        (DType::Utf8(_), Literal::Text(text)) => Ok(Scalar::utf8(text.as_str(), nullability)),
        (DType::Primitive(ptype, _), literal) => {
            let value = primitive(literal, *ptype).ok_or_else(mismatch)?;
            Ok(Scalar::primitive_value(value, *ptype, nullability))
        }
        (DType::Extension(extension), literal) => {
            let unit = extension.metadata_opt::<AnyTemporal>().map(|t| t.time_unit());
            let DType::Primitive(ptype, _) = extension.storage_dtype() else {
                return Err(mismatch());
            };
            let ticks = ticks(literal, unit.ok_or_else(mismatch)?).ok_or_else(mismatch)?;
            let value = primitive(&Literal::Int(ticks), *ptype).ok_or_else(mismatch)?;
            let storage = Scalar::primitive_value(value, *ptype, nullability);
            Ok(Scalar::extension_ref(extension.with_nullability(nullability), storage))
        }
        _ => Err(mismatch()),
    }
}

/// A number as a value of the column's own width; none if it does not fit.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a literal is rounded to the nearest value of the column's float type"
)]
fn primitive(literal: &Literal, ptype: PType) -> Option<PValue> {
    let as_float = match *literal {
        Literal::Int(value) => value as f64,
        Literal::Float(value) => value,
        _ => return None,
    };
    match ptype {
        PType::F16 => return Some(PValue::F16(f16::from_f64(as_float))),
        PType::F32 => return Some(PValue::F32(as_float as f32)),
        PType::F64 => return Some(PValue::F64(as_float)),
        _ => {}
    }
    let &Literal::Int(value) = literal else {
        return None;
    };
    Some(match ptype {
        PType::U8 => PValue::U8(value.try_into().ok()?),
        PType::U16 => PValue::U16(value.try_into().ok()?),
        PType::U32 => PValue::U32(value.try_into().ok()?),
        PType::U64 => PValue::U64(value.try_into().ok()?),
        PType::I8 => PValue::I8(value.try_into().ok()?),
        PType::I16 => PValue::I16(value.try_into().ok()?),
        PType::I32 => PValue::I32(value.try_into().ok()?),
        PType::I64 => PValue::I64(value.try_into().ok()?),
        PType::F16 | PType::F32 | PType::F64 => return None,
    })
}

/// A point in time in the column's unit: a quoted date or timestamp, or ticks as they are.
fn ticks(literal: &Literal, unit: TimeUnit) -> Option<i128> {
    let nanos = match literal {
        Literal::Int(value) => return Some(*value),
        Literal::Text(text) => parse_instant(text)?,
        _ => return None,
    };
    let per_tick: i128 = match unit {
        TimeUnit::Nanoseconds => 1,
        TimeUnit::Microseconds => 1_000,
        TimeUnit::Milliseconds => 1_000_000,
        TimeUnit::Seconds => 1_000_000_000,
        TimeUnit::Days => 86_400_000_000_000,
    };
    (nanos % per_tick == 0).then_some(nanos / per_tick)
}
