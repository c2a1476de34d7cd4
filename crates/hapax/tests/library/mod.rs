//! Apps that embed Hapax.

mod postgres;
mod sqlite;
