//! Ingress, HTTP, workers and sender of the engine.

mod http;
mod ingress;
mod jobs;
mod outbound;
mod sender;
mod support;
mod worker;
