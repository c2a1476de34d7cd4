//! Schemes, keys, envelopes and handlers, by their public names.

mod envelope;
mod handler;
mod handler_sql;
mod handler_sql_postgres;
mod keys;
mod lifecycle;
mod schemes;
mod vectors;
