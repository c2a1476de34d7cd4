//! Handlers and sending on the real server: each effect once, in order, through crashes.

mod crash;
mod event_plans;
mod handlers;
mod hanging;
mod order;
mod refetch;
mod sending;
mod sending_crashes;
mod signing;
mod vault;
