//! The pure domain of Hapax: how a webhook proves its sender, which event it is, and what happens to it.
//!
//! Nothing here opens a socket, reads a clock, draws random numbers, runs SQL or needs a runtime:
//! callers pass those in. Start with [`mod@verify`], the only function that makes a [`Receipt`], then
//! [`store`], the traits that every database implements.

pub mod alert_board;
pub mod arrival;
pub mod circuit;
pub mod delivery;
mod ed25519;
pub mod endpoint;
pub mod endpoint_check;
pub mod endpoint_secret;
pub mod envelope;
#[cfg(feature = "failpoints")]
pub mod failpoint;
pub mod handler;
pub mod handshake;
pub mod hop_headers;
pub mod job;
pub mod json;
pub mod jwt;
pub mod key;
pub mod ledger;
pub mod lifecycle;
pub mod limits;
pub mod log_buckets;
pub mod message;
pub mod order;
pub mod own_messages;
pub mod presets;
pub mod rate_limit;
pub mod receipt;
pub mod sample;
pub mod scheme;
pub mod search;
pub mod secret;
pub mod source;
pub mod source_secrets;
pub mod store;
pub mod vault;
pub mod verify;

pub use arrival::Arrival;
pub use key::{EventKey, KeyHash, SourceName, Tenant};
pub use receipt::{ContentGuard, GuardKeep, GuardSeen, Neighbours, Receipt, Timeliness};
pub use source::Source;
pub use verify::{Refusal, Verified, claimed_id, verify, verify_with_key};

/// The one type for time: an instant in UTC. The caller decides which clock it comes from.
pub use jiff::Timestamp;

/// A named point at which a test may abort or stop the process. Without the feature `failpoints` the point
/// compiles to nothing.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        $crate::failpoint::hit($name, None)
    };
    ($name:literal, $event_id:expr) => {
        $crate::failpoint::hit($name, Some($event_id))
    };
}

/// A named point at which a test may abort or stop the process. Without the feature `failpoints` the point
/// compiles to nothing.
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {};
    ($name:literal, $event_id:expr) => {};
}

/// A value that a test may change through the environment. Without the feature `failpoints` the value is
/// exactly `$default`.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! tuned {
    ($name:literal, $default:expr) => {
        $crate::failpoint::setting($name).unwrap_or($default)
    };
}

/// A value that a test may change through the environment. Without the feature `failpoints` the value is
/// exactly `$default`.
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! tuned {
    ($name:literal, $default:expr) => {
        $default
    };
}
