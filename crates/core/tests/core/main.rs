//! Tests of schemes, keys, envelopes, handlers, secrets, deliveries and the vault through the public API.

mod circuit;
mod delivery;
mod endpoint_secret;
mod envelope;
mod handler;
mod handler_sql;
mod handler_sql_postgres;
mod keys;
mod lifecycle;
mod lifecycle_page;
mod schemes;
mod source_secrets;
mod vault;
mod vectors;
