//! Little-endian encoding of message heads. Declared field by field: no serializer decides the wire.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use chain::id::{
    ChainId, ChainVersion, ChannelId, ChunkId, ClientId, InodeId, NodeId, RoutingVersion, TargetId,
    UpdateId, UpdateVersion,
};

/// Most elements that one list of a message may have; a longer one is refused before allocation.
pub const LIST_MAX: usize = 1 << 20;

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end inside a field.
    #[error("message ends inside {0}")]
    Truncated(&'static str),
    /// Bytes are left after the last field.
    #[error("{0} bytes after the last field")]
    Trailing(usize),
    /// A field holds a value that its type does not have.
    #[error("{field} has no value {value}")]
    Unknown {
        /// The field's type.
        field: &'static str,
        /// The value found.
        value: u64,
    },
    /// A list or string is longer than allowed, or than the bytes that are left.
    #[error("{field} has length {length}, more than allowed or present")]
    Length {
        /// The field's type.
        field: &'static str,
        /// The length found.
        length: usize,
    },
}

/// A cursor that only moves forward.
#[derive(Clone, Debug)]
pub struct Reader {
    bytes: Bytes,
}

impl Reader {
    /// Reads from the start of `bytes`.
    #[must_use]
    pub const fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    /// Bytes not read yet.
    #[must_use]
    pub fn left(&self) -> usize {
        self.bytes.len()
    }

    /// The next `length` bytes, without a copy.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] if fewer are left.
    pub fn take(&mut self, length: usize, field: &'static str) -> Result<Bytes, DecodeError> {
        if self.bytes.len() < length {
            return Err(DecodeError::Truncated(field));
        }
        Ok(self.bytes.split_to(length))
    }

    /// A list length that the bytes left can hold, at `element_min` bytes an element.
    fn list(&mut self, field: &'static str, element_min: usize) -> Result<usize, DecodeError> {
        let length = u32::decode(self)? as usize;
        if length > LIST_MAX || length.saturating_mul(element_min) > self.left() {
            return Err(DecodeError::Length { field, length });
        }
        Ok(length)
    }

    /// # Errors
    /// [`DecodeError::Trailing`] if bytes are left.
    pub fn finish(&self) -> Result<(), DecodeError> {
        match self.left() {
            0 => Ok(()),
            n => Err(DecodeError::Trailing(n)),
        }
    }
}

/// A value with one encoding.
pub trait Wire: Sized {
    /// Least size of the encoding in bytes: bounds what a claimed list length may allocate.
    const MIN_SIZE: usize;

    /// Appends the encoding.
    fn encode(&self, out: &mut BytesMut);

    /// Reads one value.
    ///
    /// # Errors
    /// [`DecodeError`] names the field.
    fn decode(from: &mut Reader) -> Result<Self, DecodeError>;

    /// The whole encoding.
    fn to_bytes(&self) -> Bytes {
        let mut out = BytesMut::new();
        self.encode(&mut out);
        out.freeze()
    }

    /// Reads a value that fills `bytes` exactly.
    ///
    /// # Errors
    /// [`DecodeError`], also for bytes after the value.
    fn from_bytes(bytes: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let value = Self::decode(&mut reader)?;
        reader.finish()?;
        Ok(value)
    }
}

macro_rules! wire_int {
    ($($ty:ident $put:ident $get:ident;)*) => {$(
        impl Wire for $ty {
            const MIN_SIZE: usize = size_of::<$ty>();
            fn encode(&self, out: &mut BytesMut) {
                out.$put(*self);
            }
            fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
                Ok(from.take(size_of::<$ty>(), stringify!($ty))?.$get())
            }
        }
    )*};
}
wire_int! {
    u8 put_u8 get_u8;
    u16 put_u16_le get_u16_le;
    u32 put_u32_le get_u32_le;
    u64 put_u64_le get_u64_le;
    u128 put_u128_le get_u128_le;
    i64 put_i64_le get_i64_le;
}

macro_rules! wire_id {
    ($($id:ident($raw:ty);)*) => {$(
        impl Wire for $id {
            const MIN_SIZE: usize = size_of::<$raw>();
            fn encode(&self, out: &mut BytesMut) {
                self.get().encode(out);
            }
            fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
                <$raw>::decode(from).map($id::new)
            }
        }
    )*};
}
wire_id! {
    NodeId(u32); TargetId(u64); ChainId(u32); ChainVersion(u64); UpdateVersion(u64);
    RoutingVersion(u64); InodeId(u64); ClientId(u128); ChannelId(u32);
}

impl Wire for () {
    const MIN_SIZE: usize = 0;
    fn encode(&self, _: &mut BytesMut) {}
    fn decode(_: &mut Reader) -> Result<Self, DecodeError> {
        Ok(())
    }
}

impl Wire for bool {
    const MIN_SIZE: usize = 1;
    fn encode(&self, out: &mut BytesMut) {
        out.put_u8(u8::from(*self));
    }
    fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
        match u8::decode(from)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(DecodeError::Unknown { field: "bool", value: value.into() }),
        }
    }
}

/// `u32` length, then the bytes.
impl Wire for Bytes {
    const MIN_SIZE: usize = 4;
    fn encode(&self, out: &mut BytesMut) {
        encode_length(self.len(), out);
        out.put_slice(self);
    }
    fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
        let length = u32::decode(from)? as usize;
        if length > from.left() {
            return Err(DecodeError::Length { field: "bytes", length });
        }
        from.take(length, "bytes")
    }
}

/// UTF-8, encoded as bytes.
impl Wire for String {
    const MIN_SIZE: usize = 4;
    fn encode(&self, out: &mut BytesMut) {
        encode_length(self.len(), out);
        out.put_slice(self.as_bytes());
    }
    fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
        let bytes = Bytes::decode(from)?;
        let length = bytes.len();
        Self::from_utf8(bytes.into()).map_err(|_| DecodeError::Length { field: "utf-8", length })
    }
}

/// `u32` count, then the elements.
impl<T: Wire> Wire for Vec<T> {
    const MIN_SIZE: usize = 4;
    fn encode(&self, out: &mut BytesMut) {
        encode_length(self.len(), out);
        for element in self {
            element.encode(out);
        }
    }
    fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
        let count = from.list("list", T::MIN_SIZE.max(1))?;
        (0..count).map(|_| T::decode(from)).collect()
    }
}

/// One byte 0 or 1, then the value if 1.
impl<T: Wire> Wire for Option<T> {
    const MIN_SIZE: usize = 1;
    fn encode(&self, out: &mut BytesMut) {
        self.is_some().encode(out);
        if let Some(value) = self {
            value.encode(out);
        }
    }
    fn decode(from: &mut Reader) -> Result<Self, DecodeError> {
        if bool::decode(from)? { T::decode(from).map(Some) } else { Ok(None) }
    }
}

/// Lists and strings are bounded far below `u32::MAX` by the frame limit.
fn encode_length(length: usize, out: &mut BytesMut) {
    out.put_u32_le(u32::try_from(length).unwrap_or(u32::MAX));
}

/// Declares a message: the fields in wire order, each encoded by its own [`Wire`].
#[macro_export]
macro_rules! wire_struct {
    ($(#[$doc:meta])* pub struct $name:ident {
        $($(#[$field_doc:meta])* pub $field:ident: $ty:ty,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }
        $crate::wire_fields!($name { $($field: $ty,)* });
    };
}

/// Gives an existing struct its encoding: the listed fields in order.
#[macro_export]
macro_rules! wire_fields {
    ($name:ty { $($field:ident: $ty:ty),* $(,)? }) => {
        impl $crate::codec::Wire for $name {
            const MIN_SIZE: usize = 0 $(+ <$ty as $crate::codec::Wire>::MIN_SIZE)*;
            fn encode(&self, out: &mut ::bytes::BytesMut) {
                $($crate::codec::Wire::encode(&self.$field, out);)*
                let _ = &out;
            }
            fn decode(
                from: &mut $crate::codec::Reader,
            ) -> Result<Self, $crate::codec::DecodeError> {
                let _ = &from;
                Ok(Self { $($field: $crate::codec::Wire::decode(from)?,)* })
            }
        }
    };
}

/// Gives a fieldless enum its encoding: one byte a variant, as listed.
#[macro_export]
macro_rules! wire_enum {
    ($name:ident { $($variant:ident = $value:literal),* $(,)? }) => {
        impl $crate::codec::Wire for $name {
            const MIN_SIZE: usize = 1;
            fn encode(&self, out: &mut ::bytes::BytesMut) {
                let value: u8 = match self { $(Self::$variant => $value,)* };
                $crate::codec::Wire::encode(&value, out);
            }
            fn decode(
                from: &mut $crate::codec::Reader,
            ) -> Result<Self, $crate::codec::DecodeError> {
                match <u8 as $crate::codec::Wire>::decode(from)? {
                    $($value => Ok(Self::$variant),)*
                    value => Err($crate::codec::DecodeError::Unknown {
                        field: stringify!($name),
                        value: value.into(),
                    }),
                }
            }
        }
    };
}

wire_fields!(ChunkId { file: InodeId, index: u64 });
wire_fields!(UpdateId { client: ClientId, channel: ChannelId, seq: u64 });

#[cfg(test)]
#[expect(unreachable_pub, reason = "wire types are public wherever they are declared")]
mod tests {
    use super::*;

    wire_struct! {
        pub struct Sample {
            pub number: u64,
            pub name: String,
            pub list: Vec<Option<u16>>,
            pub flag: bool,
        }
    }

    fn sample() -> Sample {
        Sample { number: 7, name: "ö".into(), list: vec![Some(1), None], flag: true }
    }

    #[test]
    fn encodes_little_endian_in_field_order() {
        let expected = "0700000000000000 02000000c3b6 02000000 010100 00 01".replace(' ', "");
        let hex: String = sample().to_bytes().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, expected);
    }

    #[test]
    fn every_cut_is_an_error_and_never_a_panic() {
        let whole = sample().to_bytes();
        assert_eq!(Sample::from_bytes(whole.clone()), Ok(sample()));
        for cut in 0..whole.len() {
            assert!(Sample::from_bytes(whole.slice(..cut)).is_err(), "cut at {cut}");
        }
        let mut longer = BytesMut::from(&whole[..]);
        longer.put_u8(0);
        assert_eq!(Sample::from_bytes(longer.freeze()), Err(DecodeError::Trailing(1)));
    }

    #[test]
    fn a_lying_list_length_is_refused_before_allocation() {
        let mut out = BytesMut::new();
        u32::MAX.encode(&mut out);
        let lie = Vec::<u64>::from_bytes(out.freeze());
        assert_eq!(lie, Err(DecodeError::Length { field: "list", length: u32::MAX as usize }));
    }
}
