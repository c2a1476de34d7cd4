//! Secrets: held so that they cannot be printed, and wiped when dropped.

use std::fmt;

use jiff::Timestamp;
use zeroize::Zeroizing;

/// A secret as configured. It has no way to reach a log: `Debug` hides it, `Display` is not there.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes the text as it is: no trimming, since some senders sign with blanks in their secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// The text itself. Every caller of this is a place to look at when asking where secrets go.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// One of the secrets that may have signed, and when it stops to count.
#[derive(Debug, Clone)]
pub struct ActiveSecret {
    /// The secret.
    pub secret: Secret,
    /// From this instant on it verifies nothing; `None` is for ever.
    pub until: Option<Timestamp>,
}

impl ActiveSecret {
    /// A secret without an end.
    pub fn forever(secret: Secret) -> Self {
        Self { secret, until: None }
    }

    /// Whether it may still verify at `now`.
    pub fn is_active(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}
