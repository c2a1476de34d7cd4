//! The first value of a result, whatever its type, as text. The driver reads values in their binary
//! form. Simple types are formatted here. Values of other types are sent back to the server, which
//! knows the text form of each type.

use std::error::Error;

use bytes::{BufMut, BytesMut};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, IsNull, Kind, ToSql, Type, to_sql_checked};
use uuid::Uuid;

/// A value that is not yet converted to text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ValueText {
    /// No row, no column, or null.
    Nothing,
    Text(String),
    /// The server must format these bytes.
    Of(Type, Vec<u8>),
}

/// The first column of the first row.
pub(super) fn first(rows: &[Row]) -> ValueText {
    let Some((row, column)) = rows.first().and_then(|row| Some((row, row.columns().first()?)))
    else {
        return ValueText::Nothing;
    };
    match row.try_get::<_, Option<Bytes<'_>>>(0) {
        Ok(Some(Bytes(bytes))) => shown(column.type_(), bytes),
        Ok(None) | Err(_) => ValueText::Nothing,
    }
}

fn shown(of: &Type, bytes: &[u8]) -> ValueText {
    let text = |bytes: &[u8]| ValueText::Text(String::from_utf8_lossy(bytes).into_owned());
    let number = |text: Option<String>| text.map_or(ValueText::Nothing, ValueText::Text);
    match *of {
        Type::TEXT | Type::VARCHAR | Type::BPCHAR | Type::NAME | Type::UNKNOWN | Type::JSON => {
            text(bytes)
        }
        // The first byte is the version of the format.
        Type::JSONB => text(bytes.get(1..).unwrap_or_default()),
        Type::BOOL => ValueText::Text((bytes != [0]).to_string()),
        Type::INT2 => number(bytes.try_into().ok().map(|it| i16::from_be_bytes(it).to_string())),
        Type::INT4 => number(bytes.try_into().ok().map(|it| i32::from_be_bytes(it).to_string())),
        Type::INT8 => number(bytes.try_into().ok().map(|it| i64::from_be_bytes(it).to_string())),
        Type::UUID => number(Uuid::from_slice(bytes).ok().map(|it| it.to_string())),
        Type::BYTEA => ValueText::Text(format!("{} bytes", bytes.len())),
        // Types that cannot be sent back.
        _ if matches!(of.kind(), Kind::Pseudo) || *of == Type::RECORD => ValueText::Nothing,
        _ => ValueText::Of(of.clone(), bytes.to_vec()),
    }
}

/// The raw bytes of a value.
struct Bytes<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Bytes<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

/// A value that is sent back unchanged.
#[derive(Debug)]
pub(super) struct RawValue(pub(super) Vec<u8>);

impl ToSql for RawValue {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}
