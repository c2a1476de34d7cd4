//! Apps that embed Hapax.

mod postgres;
mod sqlite;
#[path = "../support/mod.rs"]
mod support;
