//! The portal: which visitors get in, what each link permits, and that no link reaches an object of another tenant.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use hapax_core::Tenant;
use hapax_core::circuit::FAILURES_MAX;
use hapax_core::delivery::{DeliveryId, DeliveryStatus};
use hapax_core::endpoint::{
    EndpointAct, EndpointChanged, EndpointId, EndpointSealed, EndpointSettings, NewEndpoint,
};
use hapax_core::job::Retry;
use hapax_core::log_buckets::bucket_of;
use hapax_core::message::NewMessage;
use hapax_core::store::{
    Action, AdminRecords as _, AttemptOutcome, AttemptVerdict, AuditFilter, DeliveryAsk,
    DeliveryFilter, DeliveryPlan, EndpointFigures, EndpointHistory as _, EndpointHour,
    EndpointSignal, HandlerAnswer, InspectOutbox as _, NewPlan, Outbox as _, PlanCreated, PlanId,
    PlanState, PlannedDeliveries, Plans as _, PortalLink, PortalLinkId, PortalLinks as _,
    PortalRight, PortalRights, TallyKind,
};
use hapax_core::vault::{SealContext, Vault, VaultKey};
use hapax_sim::Act;
use hapax_store::MemoryStore;
use serde_json::{Value, json};
use tower::ServiceExt as _;
use uuid::Uuid;

use super::super::WithoutToken;
use super::super::auth::hash_of;
use super::super::portal::routes::routes;
use super::browser::{Answered, SAME_ORIGIN, answered};
use super::{HeldBody, Server, noon, server, server_with};

/// All rights, as the API names them.
const ALL: [&str; 3] = ["read", "replay", "endpoints"];

/// The name of the node that made an attempt.
const NODE: &str = "node-of-the-operator";

/// The reason of a failed attempt, as the operator sees it.
const REASON: &str = "connecting to 10.9.8.7:443: connection refused";

fn vault() -> Vault {
    Vault::new(VaultKey::from_bytes(&[1; 32]), Vec::new()).unwrap()
}

/// Asks for one delivery.
fn one_delivery(vault: &Vault) -> DeliveryAsk {
    DeliveryAsk {
        limit: 1,
        bytes_max: 1 << 20,
        node: NODE.into(),
        vault_keys: Arc::from([vault.current_key_id()]),
        claims_ahead: false,
    }
}

impl Server {
    /// A request to the portal as a browser sends it.
    async fn visit(
        &self,
        method: Method,
        path: &str,
        more: &[(&str, &str)],
        form: &str,
    ) -> Answered {
        let request = Request::builder().method(method).uri(path);
        answered(&self.portal, request.header("host", "webhooks.example.com"), more, form).await
    }

    /// Makes a link for a tenant, and returns the path to enter.
    async fn link(&self, tenant: &str, allow: &[&str]) -> String {
        let path = format!("/api/v1/tenants/{tenant}/portal");
        let (status, made) = self.post(&path, json!({ "ttl": "1h", "allow": allow })).await;
        assert_eq!(status, StatusCode::CREATED, "{made}");
        let url = made["url"].as_str().unwrap();
        url.strip_prefix("https://webhooks.example.com").expect("the portal's URL").to_owned()
    }

    async fn enter(&self, door: &str) -> Visit {
        let entered = self.visit(Method::POST, door, &[SAME_ORIGIN], "").await;
        assert_eq!(entered.status, StatusCode::SEE_OTHER, "{}", entered.text);
        let base = entered.header(header::LOCATION).trim_end_matches('/').to_owned();
        let cookie = entered.header(header::SET_COOKIE);
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Lax"), "{cookie}");
        assert!(cookie.contains(&format!("Path={base};")), "{cookie}");
        Visit { base, cookie: cookie.split(';').next().unwrap().to_owned() }
    }

    /// Makes a link and enters through it.
    async fn entered(&self, tenant: &str, allow: &[&str]) -> Visit {
        self.enter(&self.link(tenant, allow).await).await
    }

    /// An endpoint of a tenant with one dead delivery and a plan about it.
    pub(super) async fn things(&self, tenant: &str, url: &str) -> Things {
        let store = self.store.faults.inner();
        let tenant = Tenant::new(tenant);
        let id = EndpointId(Uuid::now_v7());
        let vault = vault();
        let owner = id.to_string();
        let context = SealContext::endpoint_secrets(&tenant, &owner);
        let sealed =
            EndpointSealed { secrets: vault.seal(&context, b"a secret", [7; 12]), headers: None };
        let settings = EndpointSettings {
            metadata: [("internal".to_owned(), "metadata-of-the-operator".to_owned())].into(),
            header_names: vec!["x-api-key".to_owned()],
            ..EndpointSettings::at(url)
        };
        let new = NewEndpoint { id, tenant: tenant.clone(), settings, sealed };
        store.create_endpoint(new, by()).await.unwrap();
        let message = NewMessage::new(format!("{tenant}.paid"), json!({ "of": tenant.as_str() }));
        let message = message.with_tenant(tenant.as_str());
        store.publish(message).await.unwrap();
        let ask = one_delivery(&vault);
        let claimed = store.exchange(Vec::new(), ask.clone()).await.unwrap().claims;
        let claim = claimed.into_iter().next().expect("a due delivery");
        let verdict = AttemptVerdict::Failed {
            error: REASON.to_owned(),
            answer: None,
            retry: Retry::Never,
            says: EndpointSignal::Works,
        };
        let took = Duration::from_millis(31);
        let outcome =
            AttemptOutcome { delivery: claim.delivery, fence: claim.fence, took, verdict };
        store.exchange(vec![outcome], DeliveryAsk { limit: 0, ..ask }).await.unwrap();
        let since = noon() - Duration::from_secs(3_600);
        let work =
            DeliveryPlan { endpoint: id, which: PlannedDeliveries::Dead, since, until: None };
        let request = hapax_core::KeyHash::of(b"a test", [&b"x"[..]]);
        let plan = NewPlan {
            id: PlanId(Uuid::now_v7()),
            work: work.into(),
            rate: None,
            request,
            alone: false,
        };
        let plan = match store.create_plan(plan, by()).await.unwrap() {
            PlanCreated::Created(plan) => plan.id,
            other => panic!("{other:?}"),
        };
        Things { endpoint: id, delivery: claim.delivery, plan }
    }

    /// Changes the settings of an endpoint.
    pub(super) async fn change_endpoint(
        &self,
        id: EndpointId,
        change: impl FnOnce(&mut EndpointSettings),
    ) {
        let store = self.store.faults.inner();
        let mut record = store.endpoint(id).await.unwrap().expect("the endpoint");
        change(&mut record.settings);
        let (version, settings) = (record.version, Box::new(record.settings));
        let act = EndpointAct::Change { version, settings, sealed: record.sealed };
        store.change_endpoint(id, act, by()).await.unwrap();
    }

    /// Publishes messages of a tenant, whose endpoint fails until its circuit opens.
    pub(super) async fn fail_until_open(&self, tenant: &str) {
        let store = self.store.faults.inner();
        let vault = vault();
        for _ in 0..FAILURES_MAX {
            let message = NewMessage::new(format!("{tenant}.paid"), json!({}));
            store.publish(message.with_tenant(tenant)).await.unwrap();
            let ask = one_delivery(&vault);
            let claimed = store.exchange(Vec::new(), ask.clone()).await.unwrap().claims;
            let claim = claimed.into_iter().next().expect("a due delivery");
            let verdict = AttemptVerdict::Failed {
                error: REASON.to_owned(),
                answer: None,
                retry: Retry::In(Duration::from_secs(3_600)),
                says: EndpointSignal::Fails,
            };
            let took = Duration::from_millis(31);
            let outcome =
                AttemptOutcome { delivery: claim.delivery, fence: claim.fence, took, verdict };
            store.exchange(vec![outcome], DeliveryAsk { limit: 0, ..ask }).await.unwrap();
        }
    }

    /// Stores open links of a tenant, and returns the ids from old to new.
    async fn many_links(&self, tenant: &str, count: i64) -> Vec<PortalLinkId> {
        let mut ids = Vec::new();
        for n in 0..count {
            let id = PortalLinkId(Uuid::new_v4());
            let link = PortalLink {
                id,
                tenant: Tenant::new(tenant),
                rights: PortalRights::default(),
                created_at: noon() - Duration::from_secs(1_000 - n.unsigned_abs()),
                expires_at: noon() + Duration::from_secs(3_600),
                entered_at: None,
            };
            let code = hash_of(&n.to_string());
            self.store.faults.inner().create_portal_link(link, code).await.unwrap();
            ids.push(id);
        }
        ids
    }

    async fn delivery_status(&self, id: DeliveryId) -> DeliveryStatus {
        self.store.faults.inner().delivery(id).await.unwrap().expect("the delivery").status
    }
}

fn by() -> Action {
    Action {
        who: "operator-anna".to_owned(),
        reason: Some("a reason of hers".to_owned()),
        at: noon(),
    }
}

/// The objects of a tenant.
pub(super) struct Things {
    pub(super) endpoint: EndpointId,
    pub(super) delivery: DeliveryId,
    plan: PlanId,
}

impl Things {
    /// The path of a route with the ids of these objects.
    fn path(&self, route: &str, base: &str) -> String {
        let id = match route.split('/').nth(3) {
            Some("endpoints") => self.endpoint.to_string(),
            Some("deliveries") => self.delivery.to_string(),
            _ => self.plan.0.to_string(),
        };
        route.replace("/p/{link}", base).replace("{id}", &id)
    }
}

/// A browser that has entered.
struct Visit {
    /// The path of its pages.
    base: String,
    cookie: String,
}

impl Visit {
    async fn get(&self, server: &Server, path: &str) -> Answered {
        let path = format!("{}{path}", self.base);
        server.visit(Method::GET, &path, &[("cookie", &self.cookie)], "").await
    }

    async fn send(&self, server: &Server, method: Method, path: &str, form: &str) -> Answered {
        server.visit(method, path, &[("cookie", &self.cookie), SAME_ORIGIN], form).await
    }
}

#[tokio::test]
async fn a_link_that_no_list_shows_any_more_can_be_revoked() {
    // A list shows the newest 500 links. An older one that leaked must not stay open until it ends.
    let server = server(Vec::new()).await;
    let links = server.many_links("acme", 502).await;
    let admin = async |method: Method, path: &str, form: &str| {
        let request = Request::builder().method(method).uri(path).header("host", "localhost");
        answered(&server.router, request, &[SAME_ORIGIN], form).await
    };
    let list = admin(Method::GET, "/portal", "").await.text;
    let is_shown = |id: &PortalLinkId| list.contains(&id.to_string());
    assert!(!is_shown(&links[0]) && is_shown(&links[501]), "{list}");
    assert!(list.contains("The newest 500 links are listed."), "{list}");

    let revoke = format!("/api/v1/tenants/acme/portal?link={}", links[0]);
    let answer = admin(Method::DELETE, &revoke, "").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    let answer = admin(Method::DELETE, &revoke, "").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND, "{}", answer.text);
    let elsewhere = format!("/api/v1/tenants/other/portal?link={}", links[1]);
    assert_eq!(admin(Method::DELETE, &elsewhere, "").await.status, StatusCode::NOT_FOUND);
    let page = format!("/portal/{}/revoke", links[1]);
    let question = admin(Method::GET, &page, "").await;
    assert!(question.text.contains("of the tenant acme"), "{}", question.text);
    let answer = admin(Method::POST, &page, &form()).await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.text);
    let left = server.store.faults.inner().portal_links(None, noon(), 600).await.unwrap();
    assert_eq!(left.len(), 500);

    // The audit trail says which link was revoked.
    let all = AuditFilter { limit: 10, ..AuditFilter::default() };
    let entries = server.store.faults.inner().audited(all).await.unwrap().items;
    assert!(entries.iter().any(|entry| entry.subject == revoke), "{entries:?}");
}

/// The fields of a form with an id of its own.
fn form() -> String {
    format!("plan={}&reason=x&url=https%3A%2F%2Fexample.com%2F&overlap=0s", Uuid::now_v7())
}

#[tokio::test]
async fn a_scanner_uses_up_no_link_and_a_person_uses_it_once() {
    // Programs that scan mail open every link in it, some more than once.
    let server = server(Vec::new()).await;
    let door = server.link("acme", &["read"]).await;
    for method in [Method::GET, Method::HEAD, Method::GET] {
        let scanned = server.visit(method, &door, &[], "").await;
        assert_eq!(scanned.status, StatusCode::OK, "{}", scanned.text);
        assert_eq!(scanned.header(header::SET_COOKIE), "");
    }
    let page = server.visit(Method::GET, &door, &[], "").await;
    assert_eq!(page.text.matches("<button>").count(), 1, "{}", page.text);
    let foreign = [("sec-fetch-site", "cross-site")];
    let foreign = server.visit(Method::POST, &door, &foreign, "").await;
    assert_eq!(foreign.status, StatusCode::FORBIDDEN, "another site used the code");

    let visit = server.enter(&door).await;
    assert_eq!(visit.get(&server, "/").await.status, StatusCode::OK);
    let again = server.visit(Method::POST, &door, &[SAME_ORIGIN], "").await;
    assert_eq!(again.status, StatusCode::NOT_FOUND, "the code worked twice");
    assert_eq!(again.header(header::SET_COOKIE), "");
    let page = server.visit(Method::GET, &door, &[], "").await;
    assert_eq!(page.status, StatusCode::GONE);
    assert!(page.text.contains(&format!("{}/", visit.base)), "{}", page.text);
    for wrong in ["/enter/x", "/enter/", &door[..door.len() - 1], &format!("{door}x")] {
        let page = server.visit(Method::GET, wrong, &[], "").await;
        assert_eq!(page.status, StatusCode::NOT_FOUND, "{wrong}");
    }
}

#[tokio::test]
async fn a_link_ends_at_its_time_when_it_is_revoked_and_when_its_holder_leaves() {
    let server = server(Vec::new()).await;
    let store = server.store.faults.inner();
    let link = |tenant: &str, expires_at| PortalLink {
        id: PortalLinkId(Uuid::new_v4()),
        tenant: Tenant::new(tenant),
        rights: PortalRights::default(),
        created_at: noon() - Duration::from_secs(7_200),
        expires_at,
        entered_at: None,
    };
    let is_over = async |visit: &Visit| {
        let page = visit.get(&server, "/").await;
        assert_eq!(page.status, StatusCode::UNAUTHORIZED, "{}", page.text);
    };
    // The session ends with the link.
    let ended = link("acme", noon());
    let code = "c".repeat(43);
    store.create_portal_link(ended.clone(), hash_of(&code)).await.unwrap();
    let before = noon() - Duration::from_secs(1);
    assert!(store.enter_portal(hash_of(&code), hash_of("a"), before).await.unwrap().is_some());
    is_over(&Visit { base: format!("/p/{}", ended.id), cookie: "hapax_portal=a".into() }).await;
    let door = format!("/enter/{}", "d".repeat(43));
    store.create_portal_link(link("acme", noon()), hash_of(&door[7..])).await.unwrap();
    for method in [Method::GET, Method::POST] {
        let page = server.visit(method, &door, &[SAME_ORIGIN], "").await;
        assert_eq!(page.status, StatusCode::NOT_FOUND, "{}", page.text);
    }

    let (one, other) = (server.entered("acme", &ALL).await, server.entered("shop", &ALL).await);
    let unused = server.link("acme", &ALL).await;
    let request = Request::delete("/api/v1/tenants/acme/portal").header("host", "localhost");
    let (status, revoked) = server.send(request.body(Body::empty()).unwrap()).await;
    assert_eq!((status, revoked["revoked"].as_u64()), (StatusCode::OK, Some(2)), "{revoked}");
    is_over(&one).await;
    let page = server.visit(Method::POST, &unused, &[SAME_ORIGIN], "").await;
    assert_eq!(page.status, StatusCode::NOT_FOUND, "a revoked code works");
    assert_eq!(other.get(&server, "/").await.status, StatusCode::OK);

    let path = format!("{}/logout", other.base);
    let left = other.send(&server, Method::POST, &path, "").await;
    assert!(left.header(header::SET_COOKIE).contains("Max-Age=0"), "{}", left.text);
    is_over(&other).await;
}

#[tokio::test]
async fn each_route_is_open_to_exactly_the_links_that_permit_it() {
    use PortalRight::{Endpoints, Read, Replay};
    let may = [
        (&["read"][..], &[Read][..]),
        (&["replay"], &[Read, Replay]),
        (&["endpoints"], &[Read, Endpoints]),
        (&ALL, &[Read, Replay, Endpoints]),
    ];
    for route in routes::<MemoryStore>() {
        let Some(right) = route.right else { continue };
        for (allow, permitted) in may {
            // Each case gets its own server: some routes end the link or remove the endpoint.
            let server = server(Vec::new()).await;
            let own = server.things("acme", "https://acme.example/in").await;
            let visit = server.entered("acme", allow).await;
            let path = own.path(route.path, &visit.base);
            let what = format!("{} {} with {allow:?}", route.method, route.path);

            let stranger = server.visit(route.method.clone(), &path, &[SAME_ORIGIN], "").await;
            assert_eq!(stranger.status, StatusCode::UNAUTHORIZED, "{what} without a cookie");
            let other = server.entered("acme", &ALL).await;
            let stolen = [("cookie", &*other.cookie), SAME_ORIGIN];
            let stolen = server.visit(route.method.clone(), &path, &stolen, &form()).await;
            assert_eq!(stolen.status, StatusCode::UNAUTHORIZED, "{what} with another cookie");
            if route.method == Method::POST {
                for foreign in [&[][..], &[("origin", "https://evil.example")]] {
                    let more: Vec<_> = [("cookie", &*visit.cookie)]
                        .into_iter()
                        .chain(foreign.iter().copied())
                        .collect();
                    let answer = server.visit(Method::POST, &path, &more, &form()).await;
                    assert_eq!(answer.status, StatusCode::FORBIDDEN, "{what} from {foreign:?}");
                }
            }
            assert_eq!(server.delivery_status(own.delivery).await, DeliveryStatus::Dead, "{what}");

            let answer = visit.send(&server, route.method.clone(), &path, &form()).await;
            let is_admitted = match answer.status {
                StatusCode::FORBIDDEN => false,
                // 409 says that a plan of this endpoint runs, and 503 that the server of this test has no vault.
                StatusCode::OK | StatusCode::SEE_OTHER | StatusCode::CONFLICT => true,
                StatusCode::SERVICE_UNAVAILABLE => true,
                other => panic!("{what}: {other} {}", answer.text),
            };
            assert_eq!(is_admitted, permitted.contains(&right), "{what}: {}", answer.status);
        }
    }
}

#[tokio::test]
async fn no_route_reaches_what_belongs_to_another_tenant() {
    let server = server(Vec::new()).await;
    server.things("acme", "https://acme.example/in").await;
    let foreign = server.things("shop", "https://shop.example/in").await;
    let unknown = Things {
        endpoint: EndpointId(Uuid::now_v7()),
        delivery: DeliveryId(Uuid::now_v7()),
        plan: PlanId(Uuid::now_v7()),
    };
    let visit = server.entered("acme", &ALL).await;
    let store = server.store.faults.inner();
    let endpoint = store.endpoint(foreign.endpoint).await.unwrap();
    let mut tried = 0;
    for route in routes::<MemoryStore>().iter().filter(|route| route.path.contains("{id}")) {
        let ask = async |things: &Things| {
            let path = things.path(route.path, &visit.base);
            visit.send(&server, route.method.clone(), &path, &form()).await
        };
        let (answer, absent) = (ask(&foreign).await, ask(&unknown).await);
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{} {}", route.method, route.path);
        // The answer does not even reveal that the object exists.
        assert_eq!((answer.status, answer.text), (absent.status, absent.text), "{}", route.path);
        tried += 1;
    }
    assert!(tried >= 20, "{tried} routes");
    assert_eq!(store.endpoint(foreign.endpoint).await.unwrap(), endpoint);
    assert_eq!(server.delivery_status(foreign.delivery).await, DeliveryStatus::Dead);

    let theirs = store
        .deliveries(DeliveryFilter {
            tenant: Some(Tenant::new("shop")),
            limit: 9,
            ..DeliveryFilter::default()
        })
        .await
        .unwrap();
    for path in [
        "/".to_owned(),
        "/deliveries".to_owned(),
        format!("/deliveries?endpoint={}", foreign.endpoint),
        format!("/deliveries?message={}", theirs.items[0].message),
        "/deliveries?tenant=shop".to_owned(),
        "/?tenant=shop".to_owned(),
    ] {
        let page = visit.get(&server, &path).await;
        assert_eq!(page.status, StatusCode::OK, "{path}: {}", page.text);
        assert!(!page.text.contains("shop."), "{path}: {}", page.text);
    }
}

#[tokio::test]
async fn pages_show_what_the_receiver_needs_and_nothing_of_the_operator() {
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let store = server.store.faults.inner();
    let disable = EndpointAct::Disable { reason: "disabled by operator-anna: 10.9.8.7".to_owned() };
    let changed = store.change_endpoint(own.endpoint, disable, by()).await.unwrap();
    assert!(matches!(changed, EndpointChanged::Changed(_)));
    let visit = server.entered("acme", &ALL).await;
    for route in routes::<MemoryStore>() {
        if route.right.is_none() || route.method != Method::GET {
            continue;
        }
        let page = visit.send(&server, Method::GET, &own.path(route.path, &visit.base), "").await;
        assert_eq!(page.status, StatusCode::OK, "{}: {}", route.path, page.text);
        let policy = page.header(header::CONTENT_SECURITY_POLICY);
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(page.header(header::CACHE_CONTROL), "no-store", "{}", route.path);
        for inline in ["<style", " style=", "javascript:", " onclick", "http-equiv"] {
            assert!(!page.text.contains(inline), "{} contains {inline}", route.path);
        }
        for hidden in [NODE, "10.9.8.7", "connection refused", "operator-anna", "a reason of hers"]
        {
            assert!(!page.text.contains(hidden), "{} shows {hidden}: {}", route.path, page.text);
        }
        assert!(!page.text.contains("metadata-of-the-operator"), "{}", route.path);
    }
    let page = visit.get(&server, &format!("/deliveries/{}", own.delivery)).await.text;
    for shown in ["acme.paid", "dead", "Attempt 1: no answer", "31 ms", "&quot;of&quot;"] {
        let shown = shown.replace("&quot;", "&#34;");
        assert!(page.contains(&shown), "{shown}: {page}");
    }
    let page = visit.get(&server, &format!("/endpoints/{}", own.endpoint)).await.text;
    for shown in ["https://acme.example/in", "disabled", "0 of 1", "x-api-key", "Rotate"] {
        assert!(page.contains(shown), "{shown}: {page}");
    }
}

#[tokio::test]
async fn an_endpoint_has_its_success_and_its_latency_by_the_hour() {
    // The figures of another tenant's endpoint must not be in the page of this one.
    let server = server(Vec::new()).await;
    let mine = server.things("acme", "https://acme.example/hook").await;
    let theirs = server.things("shop", "https://shop.example/hook").await;
    let hour = |endpoint, hours_ago: u64, delivered, failed| {
        let mut figures =
            EndpointFigures { delivered, failed, micros: 1, ..EndpointFigures::default() };
        let bucket = bucket_of(Duration::from_millis(40));
        figures.tallies.count(TallyKind::Attempt, bucket, delivered + failed);
        EndpointHour { endpoint, at: noon() - Duration::from_secs(3_600 * hours_ago), figures }
    };
    let counts = vec![
        hour(mine.endpoint, 0, 1, 1),
        hour(mine.endpoint, 23, 5, 1),
        hour(mine.endpoint, 24, 0, 99),
        hour(theirs.endpoint, 0, 0, 777),
    ];
    server.store.faults.record_endpoints(Uuid::nil(), counts).await.expect("records");
    let visit = server.entered("acme", &["read"]).await;
    let path = format!("/endpoints/{}", mine.endpoint);
    let request = Request::get(&path).header("host", "localhost");
    let of_operator = answered(&server.router, request, &[], "").await.text;
    for text in [visit.get(&server, &path).await.text, of_operator] {
        assert!(text.contains("75.0 % of 8 attempts succeeded"), "{text}");
        assert!(text.contains(">50.0 %<") && text.contains(">83.3 %<"), "{text}");
        assert!(!text.contains(">777<") && !text.contains(">99<"), "{text}");
    }
    let list = visit.get(&server, "/").await.text;
    assert!(list.contains(">75.0 %</td>") && !list.contains(">0.0 %<"), "{list}");
    let (_, figures) = server.get(&format!("/api/v1/endpoints/{}/figures", mine.endpoint)).await;
    assert_eq!((&figures["delivered"], &figures["failed"]), (&json!(6), &json!(2)), "{figures}");
    assert_eq!(figures["items"].as_array().unwrap().len(), 2, "{figures}");
}

#[tokio::test]
async fn text_of_a_publisher_and_of_an_endpoint_stays_text() {
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let store = server.store.faults.inner();
    let hostile = "<script>alert(1)</script>\"><img src=x onerror=alert(1)>\u{202e}";
    let mut record = store.endpoint(own.endpoint).await.unwrap().unwrap();
    record.settings.description = Some(hostile.to_owned());
    let act = EndpointAct::Change {
        version: record.version,
        settings: Box::new(record.settings),
        sealed: record.sealed,
    };
    store.change_endpoint(own.endpoint, act, by()).await.unwrap();
    let message = NewMessage::new(hostile, json!({ hostile: hostile })).with_tenant("acme");
    store.publish(message).await.unwrap();
    let ask = one_delivery(&vault());
    let claims = store.exchange(Vec::new(), ask.clone()).await.unwrap().claims;
    let answer = HandlerAnswer { status: 200, body: hostile.to_owned() };
    let outcome = AttemptOutcome {
        delivery: claims[0].delivery,
        fence: claims[0].fence,
        took: Duration::from_millis(1),
        verdict: AttemptVerdict::Delivered(answer),
    };
    store.exchange(vec![outcome], DeliveryAsk { limit: 0, ..ask }).await.unwrap();
    let visit = server.entered("acme", &ALL).await;
    for path in [
        "/".to_owned(),
        "/deliveries".to_owned(),
        format!("/endpoints/{}", own.endpoint),
        format!("/endpoints/{}/edit", own.endpoint),
        format!("/deliveries/{}", claims[0].delivery),
        format!("/deliveries/{}/replay", claims[0].delivery),
        "/deliveries?since=%3Cscript%3Ealert(1)%3C%2Fscript%3E".to_owned(),
    ] {
        let page = visit.get(&server, &path).await;
        for mark in ["<script>alert", "<img", "\u{202e}"] {
            // A form field must hold the text unchanged: otherwise saving the form would alter it.
            if path.ends_with("/edit") && mark == "\u{202e}" {
                continue;
            }
            assert!(!page.text.contains(mark), "{path} contains {mark:?}: {}", page.text);
        }
    }
}

#[tokio::test]
async fn a_replay_from_the_portal_acts_once_and_the_audit_trail_names_the_link() {
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let door = server.link("acme", &["replay"]).await;
    let visit = server.enter(&door).await;
    let path = format!("{}/deliveries/{}/replay", visit.base, own.delivery);
    let form = form();
    let first = visit.send(&server, Method::POST, &path, &form).await;
    assert_eq!(first.status, StatusCode::SEE_OTHER, "{}", first.text);
    let to = first.header(header::LOCATION);
    assert!(to.starts_with(&format!("{}/deliveries/{}", visit.base, own.delivery)), "{to}");
    let page = visit.send(&server, Method::GET, to, "").await;
    assert!(page.text.contains("The delivery is due now."), "{}", page.text);
    let again = visit.send(&server, Method::POST, &path, &form).await;
    assert_eq!(again.header(header::LOCATION), to);

    let store = server.store.faults.inner();
    let detail = store.delivery(own.delivery).await.unwrap().unwrap();
    let who = format!("portal {}", visit.base.trim_start_matches("/p/"));
    let actors: Vec<_> = detail.actions.iter().map(|note| note.who.as_str()).collect();
    assert_eq!(actors, [who.as_str()], "one replay");
    let new = format!("{}/endpoints/new", visit.base);
    let refused = visit.send(&server, Method::POST, &new, &form).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    let all = AuditFilter { limit: 10, ..AuditFilter::default() };
    let entries = store.audited(all).await.unwrap().items;
    let entries: Vec<_> =
        entries.iter().map(|entry| (&*entry.who, &*entry.action, entry.status)).collect();
    let replay = "POST /p/{link}/deliveries/{id}/replay";
    let expected = [
        (&*who, "POST /p/{link}/endpoints/new", 403),
        (&*who, replay, 303),
        (&*who, replay, 303),
        (&*who, "POST /enter/{code}", 303),
        ("loopback", "POST /api/v1/tenants/{tenant}/portal", 201),
    ];
    assert_eq!(entries, expected);
    let shown = format!("{entries:?}");
    assert!(!shown.contains(door.trim_start_matches("/enter/")), "the audit trail has the code");
}

#[tokio::test]
async fn a_form_that_was_held_back_does_not_act_after_its_link_was_revoked() {
    // The link is open when the headers arrive, and has ended when the body arrives.
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let visit = server.entered("acme", &ALL).await;
    let (body, is_read, sender) = HeldBody::with_sender();
    let request = Request::post(format!("{}/deliveries/{}/replay", visit.base, own.delivery))
        .header("host", "webhooks.example.com")
        .header("cookie", &visit.cookie)
        .header(SAME_ORIGIN.0, SAME_ORIGIN.1)
        .body(body)
        .unwrap();
    let answer = tokio::spawn(server.portal.clone().oneshot(request));
    is_read.await.unwrap();
    let request = Request::delete("/api/v1/tenants/acme/portal").header("host", "localhost");
    assert_eq!(server.send(request.body(Body::empty()).unwrap()).await.0, StatusCode::OK);
    sender.send(form().into()).unwrap();
    assert_eq!(answer.await.unwrap().unwrap().status(), StatusCode::UNAUTHORIZED);
    assert_eq!(server.delivery_status(own.delivery).await, DeliveryStatus::Dead);
}

#[tokio::test]
async fn a_receiver_sends_many_again_at_a_bounded_rate_and_in_one_plan_at_a_time() {
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let visit = server.entered("acme", &ALL).await;
    let store = server.store.faults.inner();
    let path = format!("{}/endpoints/{}/replay", visit.base, own.endpoint);
    let refused = visit.send(&server, Method::POST, &path, &form()).await;
    assert_eq!(refused.status, StatusCode::CONFLICT, "{}", refused.text);
    let mut running = own.plan;
    for (asked, expected) in [("", 10), ("&rate=7", 7), ("&rate=100000", 50)] {
        store.cancel_plan(running, by()).await.unwrap().expect("a plan");
        let sent = format!("{}{asked}", form());
        let planned = visit.send(&server, Method::POST, &path, &sent).await;
        assert_eq!(planned.status, StatusCode::SEE_OTHER, "{}", planned.text);
        let plans = store.plans(9).await.unwrap();
        let plan = plans.iter().find(|plan| plan.state == PlanState::Running).expect("it runs");
        assert_eq!(plan.rate, Some(expected), "{asked}");
        running = plan.id;
    }
}

#[tokio::test]
async fn a_link_that_floods_the_portal_is_slowed_down_and_no_other_is() {
    // All tenants and operators share one reader for lists, which one receiving party must not occupy.
    let server = server(Vec::new()).await;
    let (one, other) = (server.entered("acme", &ALL).await, server.entered("shop", &ALL).await);
    let mut refused = 0;
    for _ in 0..600 {
        let answer = one.get(&server, "/deliveries").await;
        refused += usize::from(answer.status == StatusCode::TOO_MANY_REQUESTS);
    }
    assert!((1..=400).contains(&refused), "{refused}");
    assert_eq!(other.get(&server, "/deliveries").await.status, StatusCode::OK);
}

#[tokio::test]
async fn one_count_for_receivers_runs_at_a_time() {
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let visit = server.entered("acme", &ALL).await;
    let path = format!("/endpoints/{}/replay", own.endpoint);
    let counting = server.portal_counts.try_acquire().unwrap();
    let busy = visit.get(&server, &path).await;
    assert_eq!(busy.status, StatusCode::TOO_MANY_REQUESTS, "{}", busy.text);
    drop(counting);
    for _ in 0..2 {
        assert_eq!(visit.get(&server, &path).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn a_receiver_neither_enables_what_the_operator_disabled_nor_replaces_the_reason() {
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let visit = server.entered("acme", &ALL).await;
    let store = server.store.faults.inner();
    let post = async |act: &str| {
        let path = format!("{}/endpoints/{}/{act}", visit.base, own.endpoint);
        visit.send(&server, Method::POST, &path, &form()).await
    };
    let disable = EndpointAct::Disable { reason: "unpaid".to_owned() };
    store.change_endpoint(own.endpoint, disable, by()).await.unwrap();
    let before = store.endpoint(own.endpoint).await.unwrap();
    let refused = post("enable").await;
    assert_eq!(refused.status, StatusCode::CONFLICT);
    assert!(
        refused.text.contains("the sender disabled this endpoint: ask the sender to enable it"),
        "{}",
        refused.text
    );
    assert_eq!(post("disable").await.status, StatusCode::SEE_OTHER);
    assert_eq!(store.endpoint(own.endpoint).await.unwrap(), before, "something changed");
    let path = format!("/endpoints/{}", own.endpoint);
    let page = visit.get(&server, &path).await.text;
    assert!(page.contains("ask them to enable it") && !page.contains("/enable"), "{page}");
    let page = visit.get(&server, &format!("{path}/enable")).await.text;
    assert!(page.contains("ask them to enable it") && !page.contains("unpaid"), "{page}");

    // A receiving party can enable an endpoint that it disabled itself.
    store.change_endpoint(own.endpoint, EndpointAct::Enable, by()).await.unwrap();
    for (act, is_disabled) in [("disable", true), ("enable", false)] {
        assert_eq!(post(act).await.status, StatusCode::SEE_OTHER, "{act}");
        let record = store.endpoint(own.endpoint).await.unwrap().expect("the endpoint");
        assert_eq!(record.disabled.is_some(), is_disabled, "{act}");
    }
}

#[tokio::test]
async fn a_flood_of_refused_forms_is_bounded_and_fills_no_audit_trail() {
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let (flood, other) = (server.entered("acme", &ALL).await, server.entered("acme", &ALL).await);
    let path = format!("{}/endpoints/{}/ping", flood.base, Uuid::now_v7());
    let mut limited = 0;
    for _ in 0..300 {
        let answer = flood.send(&server, Method::POST, &path, &form()).await;
        match answer.status {
            StatusCode::NOT_FOUND => {}
            StatusCode::TOO_MANY_REQUESTS => limited += 1,
            other => panic!("{other}: {}", answer.text),
        }
    }
    assert!(limited > 100, "{limited} forms were limited");
    let store = server.store.faults.inner();
    let all = AuditFilter { limit: 400, ..AuditFilter::default() };
    let entries = store.audited(all).await.unwrap().items;
    let refused = entries.iter().filter(|entry| entry.status >= 400).count();
    assert!((1..100).contains(&refused), "{refused} refusals were recorded");
    // Another link has a bound of its own.
    let path = format!("{}/deliveries/{}/replay", other.base, own.delivery);
    let answer = other.send(&server, Method::POST, &path, &form()).await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.text);
}

#[tokio::test]
async fn the_body_of_a_delivery_whose_endpoint_was_removed_is_shown_thin() {
    // The removed endpoint may never have got the whole body.
    let server = server(Vec::new()).await;
    let own = server.things("acme", "https://acme.example/in").await;
    let visit = server.entered("acme", &ALL).await;
    let path = format!("/deliveries/{}", own.delivery);
    assert!(visit.get(&server, &path).await.text.contains("&#34;of&#34;"));
    let store = server.store.faults.inner();
    store.change_endpoint(own.endpoint, EndpointAct::Delete, by()).await.unwrap();
    let page = visit.get(&server, &path).await.text;
    assert!(!page.contains("&#34;of&#34;") && page.contains("acme.paid"), "{page}");
}

#[tokio::test]
async fn a_receiver_does_not_learn_why_the_server_fails() {
    let server = server(Vec::new()).await;
    let visit = server.entered("acme", &ALL).await;
    for act in [Act::FindPortalSession, Act::ListEndpoints] {
        server.store.faults.fail_next(act, 1);
        let page = visit.get(&server, "/").await;
        assert_eq!(page.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(!page.text.contains(hapax_sim::PLANNED), "{}", page.text);
    }
    // The answer to a client that asks for JSON must not contain the reason either.
    server.store.faults.fail_next(Act::FindPortalSession, 1);
    let plain = [("cookie", &*visit.cookie), ("accept", "application/json")];
    let answer = server.visit(Method::GET, &format!("{}/", visit.base), &plain, "").await;
    assert!(!answer.text.contains(hapax_sim::PLANNED), "{}", answer.text);
    // The server of this test has no vault.
    let ping = format!("{}/endpoints/new", visit.base);
    let answer = visit.send(&server, Method::POST, &ping, &form()).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(!answer.text.contains("vault"), "{}", answer.text);
}

#[tokio::test]
async fn a_link_is_made_only_with_what_it_may_be_made_with() {
    let server = server(Vec::new()).await;
    let check = async |tenant: &str, asked: Value, expected: u16| {
        let (status, answer) =
            server.post(&format!("/api/v1/tenants/{tenant}/portal"), asked.clone()).await;
        assert_eq!(status.as_u16(), expected, "{tenant} {asked}: {answer}");
        answer
    };
    let made = check("acme", json!({}), 201).await;
    assert_eq!(
        (&made["allow"], &made["expires_at"]),
        (&json!(["read"]), &json!("2026-03-01T13:00:00Z"))
    );
    let made = check("acme", json!({ "ttl": "30d", "allow": ["endpoints", "read"] }), 201).await;
    assert_eq!(made["allow"], json!(["read", "endpoints"]));
    for bad in [
        json!({ "ttl": "0s" }),
        json!({ "ttl": "31d" }),
        json!({ "ttl": "soon" }),
        json!({ "allow": [] }),
        json!({ "allow": ["admin"] }),
        json!({ "rights": ["read"] }),
    ] {
        check("acme", bad, 400).await;
    }
    check("hapax", json!({}), 400).await;
    check(&"x".repeat(256), json!({}), 400).await;
    let server = server_with(Vec::new(), WithoutToken::Refused).await;
    for (token, expected) in
        [("ops-token", StatusCode::FORBIDDEN), ("root-token", StatusCode::CREATED)]
    {
        let answer = server.post_as(Some(token), "/api/v1/tenants/acme/portal", json!({})).await;
        assert_eq!(answer.0, expected, "{token}");
    }
}
