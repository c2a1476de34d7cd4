//! The engine of Hapax, generic over the store: the HTTP loop, the ingress, the workers, the proxy,
//! start and drain.
//!
//! Start with [`Ingress::answer`], the path of one request. [`http::serve`] is the loop below it,
//! and [`serve_ingress`] runs both until they are drained. [`Workers`] run the jobs of accepted
//! events. A [`Proxy`] runs in front of an app and is served by the same loop. The engine contains
//! no SQL and reads no config file.

mod clock_trust;
mod event_waiters;
pub mod http;
mod ingress;
mod janitor;
pub mod limits;
mod log_budget;
mod outbound;
mod plan_runner;
mod proxy;
mod request_ids;
mod run_to_completion;
mod search_indexer;
mod sender;
mod serve;
mod source_tallies;
mod worker;

pub use event_waiters::EventWaiters;
pub use http::{Drained, tls};
pub use ingress::respond::IngressResponse;
pub use ingress::routes::{AnswerMode, PathTaken, RouteChange, RouteSpec, Routes, RoutesSpec};
pub use ingress::sender_keys::SenderKeys;
pub use ingress::{Ingress, Now, is_encoded};
pub use janitor::{Janitor, Retention};
pub use limits::{BodyLimits, HttpLimits, Rate};
pub use outbound::{
    Blocked, CustomHeaders, DnsResolver, ENDPOINT_PORTS, EgressProxy, EgressProxyProblem,
    EndpointAnswer, EndpointClient, EndpointUrl, GuardRules, HeaderProblem, LookupError,
    LookupFuture, Outbound, OutboundTlsError, Resolve, SendError, SendErrorClass, UrlProblem,
    WebhookDelivery, is_public,
};
pub use plan_runner::{JobsFor, run_plans};
pub use proxy::{Proxy, ProxySpec, Upstream, UpstreamError, serve_proxy};
pub use search_indexer::SearchIndexer;
pub use sender::{EndpointCaller, EndpointTallies, Ping, Sender, SenderLimits, SenderSetup};
pub use serve::{NotReady, Readiness, serve_ingress};
pub use worker::{LaneSpec, Pulled, TenantVerifiers, Workers};
