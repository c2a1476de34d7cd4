//! The moving parts of Hapax, generic over the store: the HTTP loop, the public side that runs on
//! it, start and drain.
//!
//! Start with [`Ingress::answer`], the path of one request; [`http::serve`] is the loop below it
//! and [`serve_ingress`] the whole with its end. Nothing here knows a database or a config file.

mod body;
mod budget;
mod clock;
mod head;
pub mod http;
mod ids;
mod ingress;
mod kept;
pub mod limits;
mod rate;
mod remote;
mod respond;
mod routes;
mod runtime;
pub mod tls;
mod unstoppable;
mod wire;

pub use http::Drained;
pub use ingress::{Ingress, Now};
pub use limits::{BodyLimits, HttpLimits, Rate};
pub use respond::Answer;
pub use routes::{PathTaken, RouteSpec, Routes, RoutesSpec};
pub use runtime::{NotReady, Readiness, serve_ingress};
