//! Ingress, HTTP and workers of the engine.

mod http;
mod ingress;
mod jobs;
mod outbound;
mod support;
mod worker;
