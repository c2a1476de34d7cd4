//! Several nodes on one PostgreSQL, with and without Redis.

#[path = "../common/mod.rs"]
mod common;
mod crash;
mod once;
mod pairs;
mod postgres;
mod redis;
#[path = "../support/mod.rs"]
mod support;
