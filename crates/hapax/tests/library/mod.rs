//! Apps that embed Hapax.

mod postgres;
mod sending;
mod sqlite;
