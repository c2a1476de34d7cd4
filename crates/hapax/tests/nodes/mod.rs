//! Several nodes on one PostgreSQL, with and without Redis.

mod alerts;
mod crash;
mod event_plans;
mod once;
mod pairs;
mod portal;
mod postgres;
mod redis;
mod tenants;
