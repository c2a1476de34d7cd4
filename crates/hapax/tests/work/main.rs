//! Handlers on the real server: each effect once, in order, through crashes.

mod crash;
mod handlers;
mod order;
mod refetch;
#[path = "../support/mod.rs"]
mod support;
