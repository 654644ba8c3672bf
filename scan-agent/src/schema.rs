//! The agent's own table of column types: what a client may be told, and nothing else.
//!
//! Small on purpose. A file's column either has one of these types or the scan is refused when
//! it is opened, naming the column, never in the middle. The JSON form is part of the protocol
//! of `scan.sock`; the displayed form is part of the row digest (DIGEST.md).

use std::fmt;

use arrow_schema::{DataType, Field, TimeUnit};
use serde::{Deserialize, Serialize};

/// Deepest nesting of lists.
const MAX_DEPTH: usize = 8;

/// A named column.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// Its name in the file.
    pub name: String,
    /// Whether it may hold nulls.
    pub nullable: bool,
    /// Its type.
    #[serde(rename = "type")]
    pub kind: ColumnType,
}

/// The type of a column's values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum ColumnType {
    /// One bit a value.
    Bool,
    /// Two's complement or unsigned.
    Int {
        /// 8, 16, 32 or 64.
        bits: u8,
        /// Whether it has a sign.
        signed: bool,
    },
    /// IEEE 754.
    Float {
        /// 16, 32 or 64.
        bits: u8,
    },
    /// UTF-8 text.
    Utf8,
    /// Bytes.
    Binary,
    /// Days (32 bits) or milliseconds (64 bits) since 1970-01-01.
    Date {
        /// Day or millisecond.
        unit: Unit,
    },
    /// Time since midnight: 32 bits for s and ms, 64 for us and ns.
    Time {
        /// Second to nanosecond.
        unit: Unit,
    },
    /// 64 bits since 1970-01-01T00:00:00.
    Timestamp {
        /// Second to nanosecond.
        unit: Unit,
        /// None is local time without a zone.
        timezone: Option<String>,
    },
    /// A 128-bit integer scaled by a power of ten.
    Decimal {
        /// Digits.
        precision: u8,
        /// Digits behind the point.
        scale: i8,
    },
    /// Every row the same number of items.
    FixedSizeList {
        /// Items a row.
        size: i32,
        /// The items.
        item: Box<Self>,
    },
    /// Every row its own number of items.
    List {
        /// The items.
        item: Box<Self>,
    },
}

/// A unit of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Day.
    #[serde(rename = "d")]
    Day,
    /// Second.
    #[serde(rename = "s")]
    Second,
    /// Millisecond.
    #[serde(rename = "ms")]
    Milli,
    /// Microsecond.
    #[serde(rename = "us")]
    Micro,
    /// Nanosecond.
    #[serde(rename = "ns")]
    Nano,
}

/// A column whose type the table does not have.
#[derive(Debug, Clone, thiserror::Error)]
#[error("column {column} has type {kind}, which a scan cannot deliver")]
pub struct UnsupportedType {
    /// Name of the column.
    pub column: String,
    /// The type as the file has it.
    pub kind: String,
}

impl Column {
    /// The column that an Arrow field describes.
    pub fn from_arrow(field: &Field) -> Result<Self, UnsupportedType> {
        let kind = ColumnType::from_arrow(field.data_type(), 0).ok_or_else(|| UnsupportedType {
            column: field.name().clone(),
            kind: field.data_type().to_string(),
        })?;
        Ok(Self { name: field.name().clone(), nullable: field.is_nullable(), kind })
    }

    /// The Arrow field with this table's one layout for the type.
    pub fn to_arrow(&self) -> Field {
        Field::new(&self.name, self.kind.to_arrow(), self.nullable)
    }
}

impl ColumnType {
    /// Bytes of one value in Arrow; none if they differ from value to value.
    pub fn width(&self) -> Option<u64> {
        match self {
            // One bit, rounded up.
            Self::Bool => Some(1),
            Self::Utf8 | Self::Binary | Self::List { .. } => None,
            Self::FixedSizeList { size, item } => {
                Some(item.width()?.saturating_mul(u64::try_from(*size).unwrap_or(0)))
            }
            other => other.to_arrow().primitive_width().map(|width| width as u64),
        }
    }

    fn from_arrow(kind: &DataType, depth: usize) -> Option<Self> {
        let int = |bits, signed| Some(Self::Int { bits, signed });
        let item = |field: &Field| match depth {
            MAX_DEPTH.. => None,
            _ => Self::from_arrow(field.data_type(), depth + 1).map(Box::new),
        };
        match kind {
            DataType::Boolean => Some(Self::Bool),
            DataType::Int8 => int(8, true),
            DataType::Int16 => int(16, true),
            DataType::Int32 => int(32, true),
            DataType::Int64 => int(64, true),
            DataType::UInt8 => int(8, false),
            DataType::UInt16 => int(16, false),
            DataType::UInt32 => int(32, false),
            DataType::UInt64 => int(64, false),
            DataType::Float16 => Some(Self::Float { bits: 16 }),
            DataType::Float32 => Some(Self::Float { bits: 32 }),
            DataType::Float64 => Some(Self::Float { bits: 64 }),
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(Self::Utf8),
            DataType::Binary | DataType::LargeBinary | DataType::BinaryView => Some(Self::Binary),
            DataType::Date32 => Some(Self::Date { unit: Unit::Day }),
            DataType::Date64 => Some(Self::Date { unit: Unit::Milli }),
            DataType::Time32(unit) | DataType::Time64(unit) => {
                Some(Self::Time { unit: (*unit).into() })
            }
            DataType::Timestamp(unit, timezone) => Some(Self::Timestamp {
                unit: (*unit).into(),
                timezone: timezone.as_deref().map(str::to_owned),
            }),
            DataType::Decimal32(precision, scale)
            | DataType::Decimal64(precision, scale)
            | DataType::Decimal128(precision, scale) => {
                Some(Self::Decimal { precision: *precision, scale: *scale })
            }
            DataType::FixedSizeList(field, size) => {
                item(field).map(|item| Self::FixedSizeList { size: *size, item })
            }
            DataType::List(field)
            | DataType::LargeList(field)
            | DataType::ListView(field)
            | DataType::LargeListView(field) => item(field).map(|item| Self::List { item }),
            _ => None,
        }
    }

    fn to_arrow(&self) -> DataType {
        let item_field = |item: &Self| Field::new_list_field(item.to_arrow(), true).into();
        match self {
            Self::Bool => DataType::Boolean,
            Self::Int { bits, signed } => match (bits, signed) {
                (8, true) => DataType::Int8,
                (16, true) => DataType::Int16,
                (32, true) => DataType::Int32,
                (_, true) => DataType::Int64,
                (8, false) => DataType::UInt8,
                (16, false) => DataType::UInt16,
                (32, false) => DataType::UInt32,
                (_, false) => DataType::UInt64,
            },
            Self::Float { bits: 16 } => DataType::Float16,
            Self::Float { bits: 32 } => DataType::Float32,
            Self::Float { .. } => DataType::Float64,
            Self::Utf8 => DataType::Utf8,
            Self::Binary => DataType::Binary,
            Self::Date { unit: Unit::Day } => DataType::Date32,
            Self::Date { .. } => DataType::Date64,
            Self::Time { unit } => match unit {
                Unit::Day | Unit::Second => DataType::Time32(TimeUnit::Second),
                Unit::Milli => DataType::Time32(TimeUnit::Millisecond),
                Unit::Micro => DataType::Time64(TimeUnit::Microsecond),
                Unit::Nano => DataType::Time64(TimeUnit::Nanosecond),
            },
            Self::Timestamp { unit, timezone } => {
                DataType::Timestamp((*unit).into(), timezone.as_deref().map(Into::into))
            }
            Self::Decimal { precision, scale } => DataType::Decimal128(*precision, *scale),
            Self::FixedSizeList { size, item } => DataType::FixedSizeList(item_field(item), *size),
            Self::List { item } => DataType::List(item_field(item)),
        }
    }
}

impl From<TimeUnit> for Unit {
    fn from(unit: TimeUnit) -> Self {
        match unit {
            TimeUnit::Second => Self::Second,
            TimeUnit::Millisecond => Self::Milli,
            TimeUnit::Microsecond => Self::Micro,
            TimeUnit::Nanosecond => Self::Nano,
        }
    }
}

impl From<Unit> for TimeUnit {
    fn from(unit: Unit) -> Self {
        match unit {
            Unit::Day | Unit::Second => Self::Second,
            Unit::Milli => Self::Millisecond,
            Unit::Micro => Self::Microsecond,
            Unit::Nano => Self::Nanosecond,
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Day => "d",
            Self::Second => "s",
            Self::Milli => "ms",
            Self::Micro => "us",
            Self::Nano => "ns",
        })
    }
}

impl fmt::Display for ColumnType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("bool"),
            Self::Int { bits, signed } => write!(f, "{}{bits}", if *signed { 'i' } else { 'u' }),
            Self::Float { bits } => write!(f, "f{bits}"),
            Self::Utf8 => f.write_str("utf8"),
            Self::Binary => f.write_str("binary"),
            Self::Date { unit } => write!(f, "date[{unit}]"),
            Self::Time { unit } => write!(f, "time[{unit}]"),
            Self::Timestamp { unit, timezone } => match timezone {
                None => write!(f, "timestamp[{unit}]"),
                Some(timezone) => write!(f, "timestamp[{unit},{timezone}]"),
            },
            Self::Decimal { precision, scale } => write!(f, "decimal({precision},{scale})"),
            Self::FixedSizeList { size, item } => write!(f, "list[{size}]<{item}>"),
            Self::List { item } => write!(f, "list<{item}>"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_goes_to_arrow_and_back() {
        let kinds = [
            "bool",
            "i8",
            "u16",
            "i32",
            "u64",
            "f16",
            "f32",
            "f64",
            "utf8",
            "binary",
            "date[d]",
            "date[ms]",
            "time[s]",
            "time[ns]",
            "timestamp[us]",
            "timestamp[ms,UTC]",
            "decimal(10,2)",
            "list[3]<u8>",
            "list<list[2]<utf8>>",
        ];
        let list = |item: DataType| Field::new_list_field(item, true).into();
        let arrow = [
            DataType::Boolean,
            DataType::Int8,
            DataType::UInt16,
            DataType::Int32,
            DataType::UInt64,
            DataType::Float16,
            DataType::Float32,
            DataType::Float64,
            DataType::Utf8View,
            DataType::LargeBinary,
            DataType::Date32,
            DataType::Date64,
            DataType::Time32(TimeUnit::Second),
            DataType::Time64(TimeUnit::Nanosecond),
            DataType::Timestamp(TimeUnit::Microsecond, None),
            DataType::Timestamp(TimeUnit::Millisecond, Some("UTC".into())),
            DataType::Decimal64(10, 2),
            DataType::FixedSizeList(list(DataType::UInt8), 3),
            DataType::List(list(DataType::FixedSizeList(list(DataType::Utf8), 2))),
        ];
        for (kind, data_type) in kinds.into_iter().zip(arrow) {
            let column = Column::from_arrow(&Field::new("c", data_type, true)).unwrap();
            assert_eq!(column.kind.to_string(), kind);
            assert_eq!(Column::from_arrow(&column.to_arrow()).unwrap(), column);
            let json = serde_json::to_string(&column).unwrap();
            assert_eq!(serde_json::from_str::<Column>(&json).unwrap(), column);
        }
    }

    #[test]
    fn a_value_has_the_width_that_arrow_gives_it() {
        let item = |kind| Box::new(kind);
        let bytes = ColumnType::Int { bits: 8, signed: false };
        let image = ColumnType::FixedSizeList { size: 3072, item: item(bytes.clone()) };
        let deep = ColumnType::FixedSizeList { size: i32::MAX, item: item(image.clone()) };
        let deep = ColumnType::FixedSizeList { size: i32::MAX, item: item(deep) };
        let deep = ColumnType::FixedSizeList { size: i32::MAX, item: item(deep) };
        let names = ColumnType::FixedSizeList { size: 3, item: item(ColumnType::Utf8) };
        for (kind, width) in [
            (ColumnType::Bool, Some(1)),
            (ColumnType::Float { bits: 16 }, Some(2)),
            (ColumnType::Date { unit: Unit::Day }, Some(4)),
            (ColumnType::Timestamp { unit: Unit::Nano, timezone: None }, Some(8)),
            (ColumnType::Decimal { precision: 38, scale: 2 }, Some(16)),
            (image, Some(3072)),
            (deep, Some(u64::MAX)),
            (names, None),
            (ColumnType::Binary, None),
            (ColumnType::List { item: item(bytes) }, None),
        ] {
            assert_eq!(kind.width(), width, "{kind}");
        }
    }

    #[test]
    fn a_type_outside_the_table_is_named_with_its_column() {
        let field = Field::new("pair", DataType::Struct(arrow_schema::Fields::empty()), false);
        let error = Column::from_arrow(&field).unwrap_err();
        assert!(error.to_string().starts_with("column pair has type Struct"));
    }
}
