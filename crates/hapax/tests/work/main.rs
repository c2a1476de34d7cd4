//! Handlers and sending on the real server: each effect once, in order, through crashes.

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod full_loop;
mod handlers;
mod order;
mod refetch;
mod sending;
#[path = "../support/mod.rs"]
mod support;
