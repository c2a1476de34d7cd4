//! The moving parts of Hapax, generic over the store. So far: [`http::serve`], the HTTP loop.

mod head;
pub mod http;
pub mod limits;
pub mod tls;
mod wire;

pub use http::Drained;
pub use limits::HttpLimits;
