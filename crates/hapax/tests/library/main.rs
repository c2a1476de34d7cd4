//! Apps with Hapax inside.

mod postgres;
mod sqlite;
#[path = "../support/mod.rs"]
mod support;
