//! Idempotency-Key for any tower stack: a client that is unsure whether its request went through
//! sends it again with the same key, the work is done once, and it gets the answer of the first.
//!
//! ```
//! # use std::sync::Arc;
//! # use hapax_layer::{IdempotencyLayer, Ledger, Principal, Route, Rules};
//! # use http::HeaderName;
//! # fn app(ledger: Arc<impl Ledger>) -> Result<(), hapax_layer::RouteError> {
//! let rules = Rules::default()
//!     .principal(Principal::Header(HeaderName::from_static("x-account-id")))
//!     .required([Route::parse("POST /charges")?]);
//! let layer = IdempotencyLayer::new(ledger, Arc::new(rules));
//! # Ok(())
//! # }
//! ```
//!
//! Where keys are kept is behind [`Ledger`]. Start with [`service`],
//! which decides; [`rules`] is what it goes by, [`principal`] whose key it is, `run` the life of one
//! request that is run, and `answer` what is kept of an answer.

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
/// What verifies the tokens of [`Principal::Jwt`].
pub use hapax_core::jwt::{JwtKeys, JwtKeysError};
/// What the services behind the layer meet: a right among the extensions of their requests, answers
/// and what they mean for a key, and the seam of the stores.
pub use hapax_core::ledger::{Ledger, Quota, Reserved, Settle, StoredAnswer};
pub use principal::Principal;
pub use rules::{Route, RouteError, Rules};
pub use run::LeasedUntil;
pub use service::{Idempotency, IdempotencyLayer, IdempotencyOutcome};
pub use target::{METHOD_OVERRIDES, has_dot_segments, is_passed_on};

/// Any error, of a body that breaks off for instance.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
