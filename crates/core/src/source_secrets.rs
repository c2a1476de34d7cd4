//! The secrets that an operator sets for one (tenant, source) pair at run time: their bounds, and the bytes
//! that [`crate::vault`] seals.

use std::fmt;

use jiff::Timestamp;
use zeroize::Zeroizing;

use crate::limits::{SOURCE_SECRET_BYTES_MAX, SOURCE_SECRETS_MAX};
use crate::secret::{ActiveSecret, Secret};

/// The secrets of one pair. A request is accepted if any of them signed it and has not ended.
#[derive(Clone)]
pub struct SourceSecrets(Vec<ActiveSecret>);

/// Why secrets are refused. The message never quotes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SourceSecretsError {
    /// There are none, or too many.
    #[error("a source has 1 to {SOURCE_SECRETS_MAX} secrets, and {0} were given")]
    Count(usize),
    /// One is blank: anyone could sign with it.
    #[error("a secret is empty")]
    Empty,
    /// A secret is too long.
    #[error("a secret has more than {SOURCE_SECRET_BYTES_MAX} bytes")]
    TooLong,
    /// Two are equal.
    #[error("the same secret was given twice")]
    Repeated,
    /// One has ended already: it would verify nothing.
    #[error("a secret has an `until` that has passed")]
    Ended,
}

/// Stored secrets cannot be read: another version of Hapax wrote them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the stored secrets have a form that this version of Hapax does not know")]
pub struct UnknownSourceSecretsForm;

impl SourceSecrets {
    /// Checks secrets that an operator sets at `now`.
    pub fn new(secrets: Vec<ActiveSecret>, now: Timestamp) -> Result<Self, SourceSecretsError> {
        if !(1..=SOURCE_SECRETS_MAX).contains(&secrets.len()) {
            return Err(SourceSecretsError::Count(secrets.len()));
        }
        for (place, one) in secrets.iter().enumerate() {
            let text = one.secret.expose();
            if text.trim().is_empty() {
                return Err(SourceSecretsError::Empty);
            }
            if text.len() > SOURCE_SECRET_BYTES_MAX {
                return Err(SourceSecretsError::TooLong);
            }
            if secrets[..place].iter().any(|other| other.secret == one.secret) {
                return Err(SourceSecretsError::Repeated);
            }
            if !one.is_active(now) {
                return Err(SourceSecretsError::Ended);
            }
        }
        Ok(Self(secrets))
    }

    /// Each secret and its end.
    pub fn secrets(&self) -> &[ActiveSecret] {
        &self.0
    }

    /// The bytes to seal. The sealed bytes include the ends: the life of a secret cannot be
    /// extended without the vault's key.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let length: usize = self.0.iter().map(|one| 16 + 4 + one.secret.expose().len()).sum();
        // The exact capacity: a vector that grows would leave copies of secrets in freed memory.
        let mut bytes = Zeroizing::new(Vec::with_capacity(1 + length));
        bytes.push(FORM);
        for ActiveSecret { secret, until, .. } in &self.0 {
            let until_ns = until.map_or(NO_END, Timestamp::as_nanosecond);
            let text = secret.expose().as_bytes();
            let length = u32::try_from(text.len()).expect("a secret has at most 16 KiB");
            bytes.extend_from_slice(&until_ns.to_be_bytes());
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(text);
        }
        bytes
    }

    /// Reads what [`SourceSecrets::to_bytes`] wrote. The secrets include those that have ended meanwhile.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, UnknownSourceSecretsForm> {
        let unknown = UnknownSourceSecretsForm;
        let Some((&FORM, mut rest)) = bytes.split_first() else { return Err(unknown) };
        let mut secrets = Vec::new();
        while !rest.is_empty() {
            let (until_ns, after) = rest.split_first_chunk::<16>().ok_or(unknown)?;
            let (length, after) = after.split_first_chunk::<4>().ok_or(unknown)?;
            let length = u32::from_be_bytes(*length) as usize;
            let (text, after) = after.split_at_checked(length).ok_or(unknown)?;
            let text = std::str::from_utf8(text).map_err(|_| unknown)?;
            let until = match i128::from_be_bytes(*until_ns) {
                NO_END => None,
                until_ns => Some(Timestamp::from_nanosecond(until_ns).map_err(|_| unknown)?),
            };
            secrets.push(ActiveSecret { until, ..ActiveSecret::forever(Secret::new(text)) });
            rest = after;
        }
        if secrets.is_empty() { Err(unknown) } else { Ok(Self(secrets)) }
    }
}

impl fmt::Debug for SourceSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SourceSecrets({} hidden)", self.0.len())
    }
}

/// The form of the bytes that are sealed: this byte, and for each secret its end in nanoseconds (16 bytes,
/// [`NO_END`] for none), its length (4 bytes) and itself.
const FORM: u8 = 1;

/// The end of a secret that has none. No timestamp has this value.
const NO_END: i128 = i128::MAX;
