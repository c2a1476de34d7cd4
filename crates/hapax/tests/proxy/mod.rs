//! Idempotency-Keys through the real proxy.

mod crash;
mod faults;
mod once;
mod postgres;
