//! Idempotency-Key for any tower stack. A client that does not know whether its request succeeded sends it
//! again with the same key. The work is done once, and the client gets the first answer.
//!
//! ```
//! # use std::sync::Arc;
//! # use hapax_layer::{IdempotencyLayer, Ledger, Principal, RoutePattern, IdempotencyRules};
//! # use http::HeaderName;
//! # fn app(ledger: Arc<impl Ledger>) -> Result<(), hapax_layer::RoutePatternError> {
//! let rules = IdempotencyRules::default()
//!     .principal(Principal::Header(HeaderName::from_static("x-account-id")))
//!     .required([RoutePattern::parse("POST /charges")?]);
//! let layer = IdempotencyLayer::new(ledger, Arc::new(rules));
//! # Ok(())
//! # }
//! ```
//!
//! A [`Ledger`] stores the keys. Start with [`service`], which decides about each request. [`rules`] is
//! its configuration, [`principal`] identifies the caller, `run` runs one request, and `answer` converts
//! between responses and stored answers.

mod answer;
mod body;
mod limits;
pub mod principal;
mod problem;
mod request_waiters;
pub mod rules;
mod run;
pub mod service;
mod target;

pub use answer::answered;
pub use body::Body;
/// The keys that verify the tokens of [`Principal::Jwt`].
pub use hapax_core::jwt::{JwtKeys, JwtKeysError};
/// Types that services behind the layer use: the right to a key, in the extensions of their requests,
/// stored answers, and the trait of the stores.
pub use hapax_core::ledger::{Ledger, Quota, Reserved, Settle, StoredAnswer};
pub use principal::Principal;
pub use rules::{IdempotencyRules, RoutePattern, RoutePatternError};
pub use run::LeasedUntil;
pub use service::{Idempotency, IdempotencyLayer, IdempotencyOutcome};
pub use target::{METHOD_OVERRIDES, has_dot_segments, is_passed_on};

/// Any error, for instance of a body that is interrupted.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
