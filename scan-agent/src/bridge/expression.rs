//! Our filter as vortex's expression: columns are found, literals take the column's type, and
//! floats compare as in IEEE 754, which vortex's own comparisons do not.

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
    match (left, right) {
        (Operand::Column(a), Operand::Column(b)) => {
            let (left, right) = (dtype_of(a, scope)?, dtype_of(b, scope)?);
            if left.as_nonnullable() != right.as_nonnullable() {
                let message = format!("{} is {left} but {} is {right}", a.name, b.name);
                return Err(FilterError::new(b.position, message));
            }
            let (a, b) = (col(a.name.as_str()), col(b.name.as_str()));
            Ok(match Float::of(&left) {
                Some(float) => float.columns(operator, a, b),
                None => plain(operator, a, b),
            })
        }
        (Operand::Column(column), Operand::Literal(value, at)) => {
            let dtype = dtype_of(column, scope)?;
            let value = scalar(value, *at, &dtype)?;
            let column = col(column.name.as_str());
            Ok(match Float::of(&dtype) {
                Some(float) => float.literal(operator, column, value),
                None => plain(operator, column, lit(value)),
            })
        }
        (Operand::Literal(..), Operand::Column(_)) => {
            compare(mirrored(operator), right, left, scope)
        }
        (Operand::Literal(..), Operand::Literal(_, at)) => {
            Err(FilterError::new(*at, "a comparison needs a column"))
        }
    }
}

/// The operator that says the same with the sides exchanged.
fn mirrored(operator: Operator) -> Operator {
    match operator {
        Operator::Eq | Operator::NotEq => operator,
        Operator::Lt => Operator::Gt,
        Operator::LtEq => Operator::GtEq,
        Operator::Gt => Operator::Lt,
        Operator::GtEq => Operator::LtEq,
    }
}

/// The comparison as vortex does it.
fn plain(operator: Operator, left: Expression, right: Expression) -> Expression {
    let build = match operator {
        Operator::Eq => eq,
        Operator::NotEq => not_eq,
        Operator::Lt => lt,
        Operator::LtEq => lt_eq,
        Operator::Gt => gt,
        Operator::GtEq => gt_eq,
    };
    build(left, right)
}

/// Comparisons of a float type. Vortex orders floats totally: a NaN with a sign, -inf, negative
/// numbers, -0.0, 0.0, positive numbers, inf, a NaN without a sign.
///
/// Zero is compared by its neighbours and not by -0.0: where decimals are packed as integers, which
/// have one zero, vortex leaves 0.0 out of `-0.0 <= x` and lets it into `x < -0.0`.
#[derive(Clone, Copy)]
struct Float {
    ptype: PType,
    /// The smallest number above zero.
    tiny: f64,
}

impl Float {
    fn of(dtype: &DType) -> Option<Self> {
        let &DType::Primitive(ptype, _) = dtype else { return None };
        let tiny = match ptype {
            PType::F16 => f64::from(f16::from_bits(1)),
            PType::F32 => f64::from(f32::from_bits(1)),
            PType::F64 => f64::from_bits(1),
            _ => return None,
        };
        Some(Self { ptype, tiny })
    }

    fn lit(self, value: f64) -> Expression {
        let value = match self.ptype {
            PType::F16 => PValue::F16(f16::from_f64(value)),
            #[expect(clippy::cast_possible_truncation, reason = "a value of f32 as f64")]
            PType::F32 => PValue::F32(value as f32),
            _ => PValue::F64(value),
        };
        lit(Scalar::primitive_value(value, self.ptype, Nullability::NonNullable))
    }

    /// A column compared with a literal, which is never NaN.
    fn literal(self, operator: Operator, x: Expression, value: Scalar) -> Expression {
        let is_zero = match value.as_primitive().pvalue() {
            Some(PValue::F16(value)) => f64::from(value) == 0.0,
            Some(PValue::F32(value)) => value == 0.0,
            Some(PValue::F64(value)) => value == 0.0,
            _ => false,
        };
        let (above, below) = (self.lit(self.tiny), self.lit(-self.tiny));
        match (operator, is_zero) {
            (Operator::Eq | Operator::NotEq, false) => plain(operator, x, lit(value)),
            (Operator::Eq, true) => self.is_zero(x),
            (Operator::NotEq, true) => or(lt_eq(x.clone(), below), gt_eq(x, above)),
            (Operator::Lt, true) => and(self.not_below(x.clone()), lt_eq(x, below)),
            (Operator::LtEq, true) => and(self.not_below(x.clone()), lt(x, above)),
            (Operator::Gt, true) => and(gt_eq(x.clone(), above), self.not_above(x)),
            (Operator::GtEq, true) => and(gt(x.clone(), below), self.not_above(x)),
            (Operator::Lt | Operator::LtEq, false) => {
                and(self.not_below(x.clone()), plain(operator, x, lit(value)))
            }
            (Operator::Gt | Operator::GtEq, false) => {
                and(plain(operator, x.clone(), lit(value)), self.not_above(x))
            }
        }
    }

    /// Two columns compared.
    fn columns(self, operator: Operator, a: Expression, b: Expression) -> Expression {
        let both_zero = || and(self.is_zero(a.clone()), self.is_zero(b.clone()));
        let numbers = || and(self.not_below(a.clone()), self.not_above(b.clone()));
        let (total, holds) = match operator {
            Operator::Gt | Operator::GtEq => return self.columns(mirrored(operator), b, a),
            Operator::NotEq => return not(self.columns(Operator::Eq, a, b)),
            Operator::Eq => {
                let total = eq(a.clone(), b.clone());
                (total.clone(), or(and(total, numbers()), both_zero()))
            }
            Operator::Lt => {
                let total = lt(a.clone(), b.clone());
                (total.clone(), and(and(total, not(both_zero())), numbers()))
            }
            Operator::LtEq => {
                let total = lt_eq(a.clone(), b.clone());
                (total.clone(), and(or(total, both_zero()), numbers()))
            }
        };
        // Null if one of them is, even if the other one alone decides above; else nothing more.
        or(holds, and(total.clone(), not(total)))
    }

    fn is_zero(self, x: Expression) -> Expression {
        and(gt(x.clone(), self.lit(-self.tiny)), lt(x, self.lit(self.tiny)))
    }

    /// Not below the lowest number, where a NaN with a sign is.
    fn not_below(self, x: Expression) -> Expression {
        gt_eq(x, self.lit(f64::NEG_INFINITY))
    }

    /// Not above the highest number, where a NaN without a sign is.
    fn not_above(self, x: Expression) -> Expression {
        lt_eq(x, self.lit(f64::INFINITY))
    }
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
