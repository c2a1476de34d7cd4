//! Keys that are not configured but fetched from the sender when a request names them. Schemes define which
//! key a request names, where the key is, and how the answer becomes a key. Nothing here opens a connection.

use std::fmt;

use http::HeaderMap;
use zeroize::Zeroizing;

use super::{paypal, plaid};
use crate::key::KeyHash;
use crate::verify::Refusal;

/// A key that must be fetched before a request can be verified.
#[derive(Clone)]
pub struct KeyRequest {
    /// Equal for requests that get the same key. The value covers the address, the name of the key, and every
    /// setting of the source that affects how the answer is read.
    pub id: KeyHash,
    /// Where the key is, at one of the hosts that the sender documents.
    pub url: String,
    /// The body of a POST; without one, the key is fetched by GET. The body may hold a secret.
    pub body: Option<Zeroizing<Vec<u8>>>,
    /// The name of the key, for logs.
    pub name: String,
}

/// A fetched key that was checked.
pub struct SenderKey(pub(super) FetchedKey);

pub(super) enum FetchedKey {
    Certificate(paypal::Certificate),
    Jwk(plaid::PlaidKey),
}

/// Why an answer is not a key that can be trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SenderKeyError(pub String);

// Not derived: the body may hold a secret.
impl fmt::Debug for KeyRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRequest").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for SenderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SenderKey")
    }
}

/// The text of a header that must occur exactly once: two values could name two keys.
pub(super) fn only<'a>(headers: &'a HeaderMap, name: &str) -> Result<&'a str, Refusal> {
    let mut values = headers.get_all(name).iter();
    let first = values.next().ok_or_else(|| Refusal::Missing(format!("no {name} header")))?;
    let wrong = |problem: &str| Refusal::Signature(format!("the {name} header {problem}"));
    match values.next() {
        Some(_) => Err(wrong("occurs twice")),
        None => first.to_str().map_err(|_| wrong("is not text")),
    }
}

/// Whether a text can be the name of a key: short, and of characters that mean nothing in a URL.
pub(super) fn is_key_name(name: &str) -> bool {
    const NAME_BYTES_MAX: usize = 128;
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}
