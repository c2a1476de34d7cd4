//! Secrets: a type that cannot be printed and is wiped when dropped.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use zeroize::Zeroizing;

/// A secret as configured. It cannot reach a log: `Debug` hides it, and it has no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes the text as it is, untrimmed: some senders have spaces in their secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// The text itself. To find where secrets go, search for the callers of this function.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// One of a source's secrets, and when it expires.
#[derive(Debug, Clone)]
pub struct ActiveSecret {
    /// The secret.
    pub secret: Secret,
    /// The instant from which the secret verifies nothing. `None`: it never expires.
    pub until: Option<Timestamp>,
    /// The name that operators know it by, such as `env:STRIPE_SECRET`. Never the secret itself.
    pub reference: Option<Arc<str>>,
}

impl ActiveSecret {
    /// A secret that never expires.
    pub fn forever(secret: Secret) -> Self {
        Self { secret, until: None, reference: None }
    }

    /// The same secret, known to operators by this reference.
    pub fn known_as(self, reference: impl Into<Arc<str>>) -> Self {
        Self { reference: Some(reference.into()), ..self }
    }

    /// Whether it verifies at `now`.
    pub fn is_active(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}
