//! Ingress, HTTP and workers of the engine.

mod bench;
mod http;
mod ingress;
mod outbound;
mod support;
mod worker;
