//! Decodes secrets from the config and signatures from headers. Decoding is strict, so that a key and a
//! signature have one spelling each.

use base64::Engine;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{
    GeneralPurpose, GeneralPurposeConfig, STANDARD, URL_SAFE_NO_PAD,
};
use jiff::Timestamp;
use zeroize::Zeroizing;

use super::SchemeError;
use super::recipe::{Encoding, KeyForm};
use crate::secret::ActiveSecret;

/// A prepared key, and when it expires.
pub(super) struct ExpiringKey<K> {
    pub(super) key: K,
    until: Option<Timestamp>,
}

impl<K> ExpiringKey<K> {
    /// A key that never expires.
    pub(super) fn forever(key: K) -> Self {
        Self { key, until: None }
    }
}

/// The keys that are active at `now`, each with its index in the config.
pub(super) fn active<K>(
    keys: &[ExpiringKey<K>],
    now: Timestamp,
) -> impl Iterator<Item = (usize, &K)> {
    keys.iter()
        .enumerate()
        .filter(move |(_, expiring)| expiring.until.is_none_or(|until| now < until))
        .map(|(place, expiring)| (place, &expiring.key))
}

/// Prepares every secret, or returns which one is refused and why. At least one is required. A blank
/// secret is refused: anyone could sign with an empty key.
pub(super) fn prepare<K>(
    secrets: &[ActiveSecret],
    mut key: impl FnMut(&str) -> Result<K, String>,
) -> Result<Vec<ExpiringKey<K>>, SchemeError> {
    if secrets.is_empty() {
        return Err(SchemeError::new(
            "secrets",
            "no secret",
            "set secrets = [\"env:NAME\"] to the secret from the sender's settings",
        ));
    }
    secrets
        .iter()
        .enumerate()
        .map(|(place, secret)| {
            let text = secret.secret.expose();
            if text.trim().is_empty() {
                return Err(bad(place, "it is empty"));
            }
            let key = key(text).map_err(|problem| bad(place, &problem))?;
            Ok(ExpiringKey { key, until: secret.until })
        })
        .collect()
}

fn bad(place: usize, problem: &str) -> SchemeError {
    SchemeError::new(
        "secrets",
        format!("secret {} cannot be used: {problem}", place + 1),
        "copy it again from the sender's settings; `hapax providers NAME` shows its form",
    )
}

/// The bytes of a key. An error never quotes the secret.
pub(super) fn key_bytes(form: KeyForm, text: &str) -> Result<Zeroizing<Vec<u8>>, String> {
    let bytes = match form {
        KeyForm::Text => text.as_bytes().to_vec(),
        KeyForm::HtmlText => decode_html(text).into_bytes(),
        KeyForm::Hex => hex::decode(text).map_err(|_| "it is not hexadecimal".to_owned())?,
        KeyForm::Base64 => base64_key(text)?,
        KeyForm::Base64After(prefix) => base64_key(text.strip_prefix(prefix).unwrap_or(text))?,
        KeyForm::Base64Only(prefix) => base64_key(
            text.strip_prefix(prefix).ok_or_else(|| format!("it does not begin with {prefix}"))?,
        )?,
        KeyForm::Base64OrText(prefix) => match text.strip_prefix(prefix) {
            Some(encoded) => base64_key(encoded)?,
            None => text.as_bytes().to_vec(),
        },
        KeyForm::Base64AfterLastUnderscore => {
            base64_key(text.rsplit_once('_').map_or(text, |(_, encoded)| encoded))?
        }
    };
    if bytes.is_empty() {
        return Err("it holds no bytes".to_owned());
    }
    Ok(Zeroizing::new(bytes))
}

/// Writes `random` as a secret of this form, for development.
pub(super) fn key_text(form: KeyForm, random: &[u8; 32]) -> String {
    match form {
        KeyForm::Text | KeyForm::HtmlText | KeyForm::Hex => hex::encode(random),
        KeyForm::Base64 => STANDARD.encode(random),
        KeyForm::Base64After(prefix)
        | KeyForm::Base64Only(prefix)
        | KeyForm::Base64OrText(prefix) => {
            format!("{prefix}{}", STANDARD.encode(random))
        }
        KeyForm::Base64AfterLastUnderscore => format!("whsec_{}", STANDARD.encode(random)),
    }
}

/// Senders write base64 secrets with and without padding. Stray bits at the end are an error.
const SECRET_BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

fn base64_key(text: &str) -> Result<Vec<u8>, String> {
    SECRET_BASE64.decode(text).map_err(|_| "it is not base64".to_owned())
}

/// Decodes a signature in its canonical spelling into `into`. `None` for any other spelling.
pub(super) fn decode(encoding: Encoding, text: &[u8], into: &mut [u8]) -> Option<usize> {
    match encoding {
        Encoding::Hex => {
            let into = into.get_mut(..text.len() / 2)?;
            let (pairs, odd) = text.as_chunks();
            for ([high, low], byte) in pairs.iter().zip(&mut *into) {
                *byte = hex_digit(*high)? << 4 | hex_digit(*low)?;
            }
            odd.is_empty().then_some(into.len())
        }
        Encoding::Base64 => STANDARD.decode_slice(text, into).ok(),
        Encoding::Base64Url => URL_SAFE_NO_PAD.decode_slice(text, into).ok(),
    }
}

fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _other => None,
    }
}

/// Encodes a signature in its canonical spelling.
pub(super) fn encode(encoding: Encoding, bytes: &[u8]) -> String {
    match encoding {
        Encoding::Hex => hex::encode(bytes),
        Encoding::Base64 => STANDARD.encode(bytes),
        Encoding::Base64Url => URL_SAFE_NO_PAD.encode(bytes),
    }
}

/// Decodes the HTML entities that WordPress decodes in a secret before it signs, in one pass.
fn decode_html(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        plain.push_str(&rest[..at]);
        rest = &rest[at..];
        let entity = rest.find(';').and_then(|end| Some((entity(&rest[1..end])?, end + 1)));
        match entity {
            Some((character, length)) => {
                plain.push(character);
                rest = &rest[length..];
            }
            None => {
                plain.push('&');
                rest = &rest[1..];
            }
        }
    }
    plain.push_str(rest);
    plain
}

fn entity(name: &str) -> Option<char> {
    let number = match name {
        "lt" => return Some('<'),
        "gt" => return Some('>'),
        "amp" => return Some('&'),
        "quot" => return Some('"'),
        number => number.strip_prefix('#')?,
    };
    match number.strip_prefix(['x', 'X']) {
        Some(hex) => match hex.trim_start_matches('0') {
            "22" => Some('"'),
            "26" => Some('&'),
            "27" => Some('\''),
            _ => None,
        },
        None => match number.trim_start_matches('0') {
            "34" => Some('"'),
            "38" => Some('&'),
            "39" => Some('\''),
            "60" => Some('<'),
            "62" => Some('>'),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_has_one_spelling_only() {
        fn check(encoding: Encoding, text: &str, expected: Option<&[u8]>) {
            let mut buffer = [0; 8];
            let length = decode(encoding, text.as_bytes(), &mut buffer);
            assert_eq!(length.map(|length| &buffer[..length]), expected, "{text:?}");
        }
        check(Encoding::Hex, "00ff", Some(&[0, 255]));
        check(Encoding::Hex, "00FF", None);
        check(Encoding::Hex, "00f", None);
        check(Encoding::Hex, "00f ", None);
        check(Encoding::Hex, "000000000000000000", None);
        check(Encoding::Base64, "AP8=", Some(&[0, 255]));
        check(Encoding::Base64, "AP8", None);
        check(Encoding::Base64, "AP9=", None);
        check(Encoding::Base64, "A-8=", None);
        check(Encoding::Base64, " AP8=", None);
        check(Encoding::Base64, "AP8=\n", None);
        check(Encoding::Base64, "AAAAAAAAAAAAAAAA", None);
        check(Encoding::Base64Url, "-_8", Some(&[251, 255]));
        check(Encoding::Base64Url, "-_8=", None);
        check(Encoding::Base64Url, "+/8", None);
    }

    #[test]
    fn entities_in_a_woocommerce_secret_are_decoded_once() {
        assert_eq!(decode_html("a&amp;b&lt;&#039;&#x27;&#60;&quot;c"), "a&b<''<\"c");
        assert_eq!(decode_html("&amp;lt; & &nbsp; &"), "&lt; & &nbsp; &");
    }

    #[test]
    fn a_secret_of_another_form_is_refused_without_repeating_it() {
        for (form, text) in [
            (KeyForm::Hex, "xyz-secret"),
            (KeyForm::Base64After("whsec_"), "whsec_!!secret"),
            (KeyForm::Base64Only("whsec_"), "c2VjcmV0"),
            (KeyForm::Base64After("whsec_"), "whsec_"),
        ] {
            let problem = key_bytes(form, text).expect_err("not a key");
            assert!(!problem.contains("secret"), "{problem}");
        }
    }
}
