//! Ingress, HTTP and workers of the engine.

mod bench;
mod http;
mod ingress;
mod support;
mod worker;
