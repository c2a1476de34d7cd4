//! The route table. The router, the authorization and the OpenAPI document all read the one line of
//! a route in [`routes`]. The signature of its handler defines what the route reads and answers.

use std::sync::Arc;

use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{MethodFilter, MethodRouter};

use super::auth::Access;
use super::openapi::{DescribedHandler, Description};
use super::{
    Admin, AdminStore, alerts, audit, claims, endpoint_figures, endpoints, events, handlers,
    history, jobs, messages, nodes, pages, plans, portal, rejections, replay, review,
    source_secrets, stats, storage, tenants,
};

/// All routes of the admin side.
#[rustfmt::skip] // A line per route.
pub(super) fn routes<S: AdminStore>() -> Vec<ApiRoute<S>> {
    use Access::{Admin as Administer, Claim, Operate, Publish, Read};
    vec![
        open("/healthz", super::healthy, "Whether the process runs"),
        open("/readyz", super::ready::<S>, "Whether traffic should be sent here"),
        get(Read, "/", pages::overview::<S>, "The overview"),
        get(Read, "/find", pages::find::<S>, "Leads to the page of an id"),
        get(Read, "/events", pages::events::<S>, "The page of events"),
        get(Read, "/events/{id}", pages::event::<S>, "The page of an event"),
        get(Read, "/review", pages::review::<S>, "The page of events in review"),
        get(Read, "/dead", pages::dead::<S>, "The page of dead letters"),
        get(Read, "/jobs", pages::jobs::<S>, "The page of jobs"),
        get(Read, "/sources/{name}", pages::source::<S>, "The page of a source"),
        get(Read, "/handlers", pages::handlers::<S>, "The page of handlers"),
        get(Read, "/endpoints", pages::endpoints::<S>, "The page of endpoints"),
        get(Read, "/endpoints/{id}", pages::endpoint::<S>, "The page of an endpoint"),
        get(Read, "/messages", pages::messages::<S>, "The page of messages"),
        get(Read, "/messages/{id}", pages::message::<S>, "The page of a message"),
        get(Read, "/deliveries", pages::deliveries::<S>, "The page of deliveries"),
        get(Read, "/deliveries/{id}", pages::delivery::<S>, "The page of a delivery"),
        get(Read, "/alerts", pages::alerts::<S>, "The page of alerts"),
        get(Operate, "/alerts/{id}", pages::ask::<S, pages::TestAlert>, "Asks before a test alert"),
        post(Operate, "/alerts/{id}", pages::act::<S, pages::TestAlert>, "Publishes a test alert"),
        get(Operate, "/alerts/{id}/silence", pages::ask::<S, pages::SilenceAlert>, "Asks before an alert is silenced"),
        post(Operate, "/alerts/{id}/silence", pages::act::<S, pages::SilenceAlert>, "Silences an alert"),
        get(Operate, "/alerts/{id}/unsilence", pages::ask::<S, pages::UnsilenceAlert>, "Asks before the silence of an alert ends"),
        post(Operate, "/alerts/{id}/unsilence", pages::act::<S, pages::UnsilenceAlert>, "Ends the silence of an alert"),
        get(Operate, "/events/{id}/replay", pages::ask::<S, pages::ReplayEvent>, "Asks before a replay"),
        post(Operate, "/events/{id}/replay", pages::act::<S, pages::ReplayEvent>, "Replays an event"),
        get(Operate, "/events/{id}/approve", pages::ask::<S, pages::ApproveEvent>, "Asks before an approval"),
        post(Operate, "/events/{id}/approve", pages::act::<S, pages::ApproveEvent>, "Approves an event"),
        get(Operate, "/events/{id}/reject", pages::ask::<S, pages::RejectEvent>, "Asks before a rejection"),
        post(Operate, "/events/{id}/reject", pages::act::<S, pages::RejectEvent>, "Rejects an event"),
        get(Operate, "/events/{id}/discard", pages::ask::<S, pages::DiscardEvent>, "Asks before dead letters are discarded"),
        post(Operate, "/events/{id}/discard", pages::act::<S, pages::DiscardEvent>, "Discards the dead letters of an event"),
        get(Operate, "/deliveries/{id}/replay", pages::ask::<S, pages::ReplayDelivery>, "Asks before a delivery is sent again"),
        post(Operate, "/deliveries/{id}/replay", pages::act::<S, pages::ReplayDelivery>, "Sends a delivery again"),
        get(Operate, "/deliveries/{id}/skip", pages::ask::<S, pages::SkipDelivery>, "Asks before a delivery is given up"),
        post(Operate, "/deliveries/{id}/skip", pages::act::<S, pages::SkipDelivery>, "Gives up a delivery"),
        get(Operate, "/messages/{id}/replay", pages::ask::<S, pages::ReplayMessage>, "Asks before a message is sent again"),
        post(Operate, "/messages/{id}/replay", pages::act::<S, pages::ReplayMessage>, "Sends a message again"),
        get(Operate, "/messages/{id}/cancel", pages::ask::<S, pages::CancelMessage>, "Asks before a message is cancelled"),
        post(Operate, "/messages/{id}/cancel", pages::act::<S, pages::CancelMessage>, "Cancels a message"),
        get(Operate, "/endpoints/{id}/disable", pages::ask::<S, pages::DisableEndpoint>, "Asks before an endpoint is disabled"),
        post(Operate, "/endpoints/{id}/disable", pages::act::<S, pages::DisableEndpoint>, "Disables an endpoint"),
        get(Operate, "/endpoints/{id}/enable", pages::ask::<S, pages::EnableEndpoint>, "Asks before an endpoint is enabled"),
        post(Operate, "/endpoints/{id}/enable", pages::act::<S, pages::EnableEndpoint>, "Enables an endpoint"),
        get(Operate, "/endpoints/{id}/ping", pages::ask::<S, pages::PingEndpoint>, "Asks before a ping"),
        post(Operate, "/endpoints/{id}/ping", pages::act::<S, pages::PingEndpoint>, "Pings an endpoint"),
        get(Administer, "/endpoints/{id}/rotate", pages::ask::<S, pages::RotateEndpoint>, "Asks before a secret is rotated"),
        post(Administer, "/endpoints/{id}/rotate", pages::act::<S, pages::RotateEndpoint>, "Rotates the secret of an endpoint"),
        get(Operate, "/endpoints/{id}/replay", pages::ask::<S, pages::PlanDeliveries>, "Asks before deliveries are sent again"),
        post(Operate, "/endpoints/{id}/replay", pages::act::<S, pages::PlanDeliveries>, "Plans to send deliveries again"),
        get(Operate, "/plans/{id}", pages::ask::<S, pages::PlanEvents>, "Asks before a plan over events"),
        post(Operate, "/plans/{id}", pages::act::<S, pages::PlanEvents>, "Plans to change many events"),
        get(Read, "/replays", pages::plans::<S>, "The page of plans"),
        get(Read, "/replays/{id}", pages::plan::<S>, "The page of a plan"),
        get(Operate, "/replays/{id}/cancel", pages::ask::<S, pages::CancelPlan>, "Asks before a plan is cancelled"),
        post(Operate, "/replays/{id}/cancel", pages::act::<S, pages::CancelPlan>, "Cancels a plan"),
        get(Operate, "/handlers/{id}/pause", pages::ask::<S, pages::PauseHandler>, "Asks before a handler is paused"),
        post(Operate, "/handlers/{id}/pause", pages::act::<S, pages::PauseHandler>, "Pauses a handler"),
        get(Operate, "/handlers/{id}/resume", pages::ask::<S, pages::ResumeHandler>, "Asks before a handler is resumed"),
        post(Operate, "/handlers/{id}/resume", pages::act::<S, pages::ResumeHandler>, "Resumes a handler"),
        get(Read, "/duplicates", pages::duplicates::<S>, "The page of duplicates"),
        get(Read, "/keys", pages::keys::<S>, "The page of Idempotency-Keys"),
        get(Administer, "/keys/{id}/delete", pages::ask::<S, pages::DeleteKey>, "Asks before a key is deleted"),
        post(Administer, "/keys/{id}/delete", pages::act::<S, pages::DeleteKey>, "Deletes an Idempotency-Key"),
        get(Read, "/storage", pages::storage::<S>, "The page of storage"),
        get(Read, "/audit", pages::audit::<S>, "The page of the audit trail"),
        get(Read, "/portal", pages::portal_links::<S>, "The page of links to the portal"),
        get(Administer, "/portal/{id}/revoke", pages::ask::<S, pages::RevokePortalLink>, "Asks before a link to the portal is revoked"),
        post(Administer, "/portal/{id}/revoke", pages::act::<S, pages::RevokePortalLink>, "Revokes a link to the portal"),
        open("/login", pages::login::<S>, "The login"),
        route(Method::POST, None, "/login", pages::log_in::<S>, "Exchanges a token for a session"),
        route(Method::POST, None, "/logout", pages::log_out::<S>, "Ends a session"),
        open("/assets/{name}", pages::file, "A file that pages load"),
        get(Read, "/metrics", super::metrics::<S>, "Metrics for Prometheus"),
        get(Read, "/api/v1/openapi.json", super::openapi::<S>, "This document"),
        get(Read, "/api/v1/events", events::list::<S>, "Lists events, newest first"),
        get(Read, "/api/v1/events/{id}", events::show::<S>, "Shows all that is stored about an event"),
        post(Operate, "/api/v1/events/replay", plans::replay_events::<S>, "Plans to run the jobs of many events"),
        post(Operate, "/api/v1/events/approve", plans::approve_events::<S>, "Plans to approve many events in review"),
        post(Operate, "/api/v1/events/reject", plans::reject_events::<S>, "Plans to reject many events in review"),
        post(Operate, "/api/v1/events/discard", plans::discard_events::<S>, "Plans to discard the dead letters of many events"),
        post(Operate, "/api/v1/events/{id}/replay", replay::event::<S>, "Runs the jobs of an event now"),
        post(Operate, "/api/v1/events/{id}/approve", review::approve::<S>, "Lets the jobs of an event in review run"),
        post(Operate, "/api/v1/events/{id}/reject", review::reject::<S>, "Rejects an event in review: its jobs never run"),
        post(Operate, "/api/v1/events/{id}/discard", review::discard_of_event::<S>, "Discards the dead letters of an event"),
        get(Read, "/api/v1/handlers", handlers::list::<S>, "Lists the configured handlers"),
        post(Operate, "/api/v1/handlers/{source}/{handler}/pause", handlers::pause::<S>, "Pauses a handler: no node claims its jobs"),
        post(Operate, "/api/v1/handlers/{source}/{handler}/resume", handlers::resume::<S>, "Resumes a paused handler"),
        get(Read, "/api/v1/lanes", jobs::lanes::<S>, "Shows the backlog of each handler with an open or dead job"),
        get(Read, "/api/v1/stats", stats::stats::<S>, "Statistics of what was counted within a window"),
        get(Read, "/api/v1/history", history::history::<S>, "Counts of arrivals over time"),
        get(Read, "/api/v1/nodes", nodes::list::<S>, "Lists the nodes that run, and those that stopped without a shutdown"),
        get(Read, "/api/v1/alerts", alerts::list::<S>, "Lists what needs attention, the most severe first"),
        post(Operate, "/api/v1/alerts/test", alerts::test::<S>, "Publishes a test alert to every endpoint that subscribes to alerts"),
        post(Operate, "/api/v1/alerts/{id}/silence", alerts::silence::<S>, "Silences an alert for a time: it stays in the list and publishes no messages"),
        get(Read, "/api/v1/storage", storage::storage::<S>, "Shows what the database occupies"),
        get(Read, "/api/v1/keys", storage::keys::<S>, "Lists Idempotency-Keys, by scope and key"),
        route(Method::DELETE, Some(Administer), "/api/v1/keys", storage::delete_key::<S>, "Deletes an Idempotency-Key with its answer: the next request with it runs"),
        get(Read, "/api/v1/audit", audit::list::<S>, "Lists requests that changed something or were refused, newest first"),
        get(Read, "/api/v1/sources/{source}/rejections", rejections::list::<S>, "Lists the last requests of a source that were refused"),
        get(Read, "/api/v1/sources/{source}/secrets", source_secrets::list::<S>, "Lists the secrets of a source by their references, with the last use of each"),
        get(Read, "/api/v1/dead", jobs::dead::<S>, "Counts dead letters by error, the most frequent first"),
        get(Read, "/api/v1/jobs", jobs::list::<S>, "Lists jobs, newest first"),
        get(Read, "/api/v1/jobs/{id}", jobs::show::<S>, "Shows a job with its attempts"),
        post(Operate, "/api/v1/jobs/{id}/replay", replay::job::<S>, "Runs a job now"),
        post(Operate, "/api/v1/jobs/{id}/discard", review::discard_of_job::<S>, "Discards a dead letter"),
        post(Operate, "/api/v1/jobs/replay", replay::many::<S>, "Runs dead letters again, one page of them"),
        post(Claim, "/api/v1/claims", claims::claim::<S>, "Claims due jobs of a pull handler"),
        post(Claim, "/api/v1/claims/{job}/renew", claims::renew::<S>, "Renews the lease of a claim"),
        post(Claim, "/api/v1/claims/{job}/complete", claims::complete::<S>, "Records that a job is done; may be repeated with the same fence"),
        post(Claim, "/api/v1/claims/{job}/fail", claims::fail::<S>, "Records that an attempt failed"),
        post(Publish, "/api/v1/messages", messages::publish::<S>, "Publishes a message to every endpoint that wants it; the same id twice is one message"),
        get(Read, "/api/v1/messages", messages::list::<S>, "Lists messages, newest first"),
        get(Read, "/api/v1/messages/{id}", messages::show::<S>, "Shows a message with its deliveries and every attempt"),
        post(Operate, "/api/v1/messages/{id}/cancel", messages::cancel::<S>, "Cancels the open deliveries of a message"),
        post(Operate, "/api/v1/messages/{id}/replay", messages::replay::<S>, "Sends again the deliveries of a message that are not delivered"),
        get(Read, "/api/v1/deliveries", messages::deliveries::<S>, "Lists deliveries, newest first"),
        get(Read, "/api/v1/deliveries/{id}", messages::delivery::<S>, "Shows a delivery with every attempt"),
        post(Operate, "/api/v1/deliveries/{id}/replay", messages::replay_delivery::<S>, "Sends a delivery again, or now if it waits for its next attempt"),
        post(Operate, "/api/v1/deliveries/{id}/skip", messages::skip_delivery::<S>, "Gives up a delivery that waits or is dead, so that the next one under its key is sent"),
        get(Read, "/api/v1/endpoints", endpoints::list::<S>, "Lists endpoints, newest first"),
        post(Administer, "/api/v1/endpoints", endpoints::create::<S>, "Adds an endpoint and shows its secret, once"),
        get(Read, "/api/v1/endpoints/{id}", endpoints::show::<S>, "Shows an endpoint"),
        get(Read, "/api/v1/endpoints/{id}/figures", endpoint_figures::show::<S>, "Shows how the attempts of an endpoint went in the last 24 hours, by the hour"),
        route(Method::PATCH, Some(Administer), "/api/v1/endpoints/{id}", endpoints::change::<S>, "Changes an endpoint; a field that is missing keeps its value"),
        route(Method::DELETE, Some(Administer), "/api/v1/endpoints/{id}", endpoints::delete::<S>, "Removes an endpoint and cancels its open deliveries"),
        post(Administer, "/api/v1/endpoints/{id}/rotate", endpoints::rotate::<S>, "Gives an endpoint a new secret and shows it, once"),
        post(Operate, "/api/v1/endpoints/{id}/enable", endpoints::enable::<S>, "Delivers to a disabled endpoint again"),
        post(Operate, "/api/v1/endpoints/{id}/disable", endpoints::disable::<S>, "Holds the deliveries of an endpoint"),
        post(Operate, "/api/v1/endpoints/{id}/replay", plans::create::<S>, "Plans to send many deliveries of an endpoint again, or messages that it never got"),
        get(Read, "/api/v1/replays", plans::list::<S>, "Lists the newest plans"),
        get(Read, "/api/v1/replays/{id}", plans::show::<S>, "Shows a plan with its progress"),
        post(Operate, "/api/v1/replays/{id}/cancel", plans::cancel::<S>, "Stops a plan; the changes that it has made stay"),
        post(Operate, "/api/v1/endpoints/{id}/ping", endpoints::ping::<S>, "Sends one signed test message now; nothing is recorded or retried"),
        get(Read, "/api/v1/tenants/{tenant}/sources/{source}/secrets", tenants::show::<S>, "Shows when each secret of a tenant that was set at run time ends"),
        route(Method::PUT, Some(Administer), "/api/v1/tenants/{tenant}/sources/{source}/secrets", tenants::set::<S>, "Sets the secrets of a tenant for a source; every node uses them within a second"),
        route(Method::DELETE, Some(Administer), "/api/v1/tenants/{tenant}/sources/{source}/secrets", tenants::delete::<S>, "Removes the secrets of a tenant for a source: its requests get a 404"),
        route(Method::DELETE, Some(Administer), "/api/v1/tenants/{tenant}", tenants::erase::<S>, "Deletes what is stored for a tenant; large tenants in the background"),
        post(Administer, "/api/v1/tenants/{tenant}/portal", portal::links::create::<S>, "Makes a link with which a receiving party sees its endpoints and deliveries"),
        get(Read, "/api/v1/tenants/{tenant}/portal", portal::links::list::<S>, "Lists the links of a tenant to the portal that have not ended, newest first"),
        route(Method::DELETE, Some(Administer), "/api/v1/tenants/{tenant}/portal", portal::links::revoke::<S>, "Revokes one link of a tenant to the portal, or every one, at once on every node"),
        get(Read, "/api/v1/tenants/{tenant}/deletion", tenants::deletion::<S>, "Shows the progress of the deletion of a tenant's data"),
    ]
}

/// One route.
pub(super) struct ApiRoute<S> {
    /// `None`: no token needed.
    pub(super) access: Option<Access>,
    pub(super) method: Method,
    pub(super) path: &'static str,
    pub(super) to: MethodRouter<Arc<Admin<S>>>,
    /// The summary of the route, for the OpenAPI document.
    pub(super) summary: &'static str,
    /// Whether the route is a page of the dashboard.
    pub(super) is_page: bool,
    /// The inputs and answers of the route's function. Only the OpenAPI document needs them.
    pub(super) describe: fn() -> Description,
}

/// A GET without a token.
fn open<S, H, T>(path: &'static str, to: H, summary: &'static str) -> ApiRoute<S>
where
    S: AdminStore,
    H: Handler<T, Arc<Admin<S>>> + DescribedHandler<T>,
    T: 'static,
{
    route(Method::GET, None, path, to, summary)
}

fn get<S, H, T>(access: Access, path: &'static str, to: H, summary: &'static str) -> ApiRoute<S>
where
    S: AdminStore,
    H: Handler<T, Arc<Admin<S>>> + DescribedHandler<T>,
    T: 'static,
{
    route(Method::GET, Some(access), path, to, summary)
}

fn post<S, H, T>(access: Access, path: &'static str, to: H, summary: &'static str) -> ApiRoute<S>
where
    S: AdminStore,
    H: Handler<T, Arc<Admin<S>>> + DescribedHandler<T>,
    T: 'static,
{
    route(Method::POST, Some(access), path, to, summary)
}

fn route<S, H, T>(
    method: Method,
    access: Option<Access>,
    path: &'static str,
    to: H,
    summary: &'static str,
) -> ApiRoute<S>
where
    S: AdminStore,
    H: Handler<T, Arc<Admin<S>>> + DescribedHandler<T>,
    T: 'static,
{
    let filter = MethodFilter::try_from(method.clone()).expect("a method that routes can have");
    let to = MethodRouter::new().on(filter, to);
    ApiRoute { access, method, path, to, summary, is_page: H::IS_PAGE, describe: H::describe }
}
