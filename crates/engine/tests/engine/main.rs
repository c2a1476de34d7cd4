//! Ingress, HTTP, workers and sender of the engine.

mod http;
mod ingress;
mod jobs;
mod outbound;
mod plan_runner;
mod sender;
mod sender_keys;
mod support;
mod worker;
