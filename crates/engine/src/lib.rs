//! The moving parts of Hapax, generic over the store: the HTTP loop, the public side that runs on
//! it, the workers behind it, start and drain.
//!
//! Start with [`Ingress::answer`], the path of one request; [`http::serve`] is the loop below it
//! and [`serve_ingress`] the whole with its end. [`Workers`] do what was accepted. A [`Proxy`] stands
//! in front of an app and is served by the same loop. Nothing here knows a database or a config file.

mod app;
mod bell;
mod body;
mod body_memory;
mod budget;
mod clock;
mod connections;
mod current;
mod frames;
mod gate;
mod gauges;
mod head;
pub mod http;
mod ids;
mod ingress;
mod janitor;
mod kept;
pub mod limits;
mod outbound;
mod patience;
mod proxy;
mod rate;
mod remote;
mod respond;
mod routes;
mod runtime;
pub mod tls;
mod unstoppable;
mod wire;
mod worker;

pub use bell::Bell;
pub use http::Drained;
pub use ingress::{Ingress, Now};
pub use janitor::{Janitor, Retention};
pub use limits::{BodyLimits, HttpLimits, Rate};
pub use outbound::{Outbound, OutboundTlsError};
pub use proxy::{Proxy, ProxySpec, Upstream, UpstreamError, serve_proxy};
pub use respond::Answer;
pub use routes::{Mode, PathTaken, RouteSpec, Routes, RoutesSpec, Traffic};
pub use runtime::{NotReady, Readiness, serve_ingress};
pub use worker::{LaneSpec, Pulled, Workers};
