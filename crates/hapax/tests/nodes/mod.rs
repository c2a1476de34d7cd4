//! Several nodes on one PostgreSQL, with and without Redis.

mod crash;
mod once;
mod pairs;
mod postgres;
mod redis;
mod tenants;
