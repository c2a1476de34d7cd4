//! Finds one field in `application/x-www-form-urlencoded` bytes. `+` is a space, `%XX` a byte, and a `%`
//! without two hex digits is itself.

use std::borrow::Cow;

/// The value of `name`, or `None` without such a field. A repeated field is refused, since parsers
/// disagree about which one counts; so is one that is not UTF-8 after decoding.
pub(crate) fn find<'a>(form: &'a [u8], name: &str) -> Result<Option<Cow<'a, str>>, &'static str> {
    let mut found = None;
    for field in form.split(|&byte| byte == b'&') {
        let middle = field.iter().position(|&byte| byte == b'=').unwrap_or(field.len());
        let (key, value) = field.split_at(middle);
        if *decode(key) != *name.as_bytes() {
            continue;
        }
        if found.replace(value.strip_prefix(b"=").unwrap_or(value)).is_some() {
            return Err("occurs twice");
        }
    }
    match found.map(decode) {
        Some(Cow::Borrowed(bytes)) => std::str::from_utf8(bytes).map(|text| Some(text.into())),
        Some(Cow::Owned(bytes)) => match String::from_utf8(bytes) {
            Ok(text) => Ok(Some(text.into())),
            Err(error) => Err(error.utf8_error()),
        },
        None => Ok(None),
    }
    .map_err(|_| "is not UTF-8")
}

/// Decodes `+` and `%41`. A `%` that is not followed by two hex digits is itself.
pub(crate) fn decode(escaped: &[u8]) -> Cow<'_, [u8]> {
    if !escaped.iter().any(|byte| matches!(byte, b'+' | b'%')) {
        return Cow::Borrowed(escaped);
    }
    let mut plain = Vec::with_capacity(escaped.len());
    let mut rest = escaped;
    while let [first, after @ ..] = rest {
        rest = after;
        plain.push(match first {
            b'+' => b' ',
            b'%' => match after.get(..2).and_then(byte_of) {
                Some(byte) => {
                    rest = &after[2..];
                    byte
                }
                None => b'%',
            },
            other => *other,
        });
    }
    Cow::Owned(plain)
}

fn byte_of(digits: &[u8]) -> Option<u8> {
    let mut byte = [0];
    hex::decode_to_slice(digits, &mut byte).ok()?;
    Some(byte[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_decoded_as_browsers_encode_them() {
        let check = |form: &str, expected: Result<Option<&str>, &str>| {
            let found = find(form.as_bytes(), "a b");
            assert_eq!(found.as_ref().map(Option::as_deref), expected.as_ref().copied(), "{form}");
        };
        check("a+b=1", Ok(Some("1")));
        check("x=&a%20b=%41+%2b%", Ok(Some("A +%")));
        check("a+b", Ok(Some("")));
        check("a+b=c=d", Ok(Some("c=d")));
        check("%61+b=%e2%82%ac%zz", Ok(Some("€%zz")));
        check("ab=1", Ok(None));
        check("", Ok(None));
        check("a+b=1&a%20b=1", Err("occurs twice"));
        check("a+b=%ff", Err("is not UTF-8"));
    }
}
