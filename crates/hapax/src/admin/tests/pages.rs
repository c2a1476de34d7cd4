//! The pages of the dashboard: what each token may see and do, and that text from a sender is never rendered as markup.

use std::sync::Arc;

use axum::http::{Method, Request, StatusCode, header};
use hapax_core::endpoint::SecretAge;
use hapax_core::job::{Phase, Retry};
use hapax_core::log_buckets::bucket_of;
use hapax_core::message::NewMessage;
use hapax_core::store::{
    AdminRecords as _, AlertRecords as _, AuditFilter, CheckIn, Gauges, Outbox as _, Outcome,
    SearchIndex as _, SecretUse, TallyKind, TrafficCount, TrafficCounts, TrafficFigures,
    TrafficHistory as _, Verifier, VerifierNames as _,
};
use hapax_core::{SourceName, Tenant};
use hapax_sim::{Act, SignedEvent};
use hapax_store::MemoryStore;
use serde_json::json;
use tower::ServiceExt as _;
use uuid::Uuid;

use super::super::WithoutToken;
use super::super::auth::Access;
use super::super::routes::routes;
use super::browser::{Answered, SAME_ORIGIN, answered};
use super::{HeldBody, JobState, NewEvent, Server, event, late_event, noon, server, server_with};

impl Answered {
    /// The value of the hidden field `plan`.
    fn plan(&self) -> &str {
        let (_, rest) = self.text.split_once("name=\"plan\" value=\"").expect("a form with a plan");
        rest.split('"').next().unwrap()
    }
}

impl Server {
    /// A request as a browser sends it, with these further headers.
    async fn browse(
        &self,
        method: Method,
        path: &str,
        more: &[(&str, &str)],
        form: &str,
    ) -> Answered {
        let request = Request::builder().method(method).uri(path).header("host", "localhost");
        answered(&self.router, request, more, form).await
    }

    /// Moves the clock until no earlier rendering is still shared.
    fn shared_pages_end(&self) {
        self.store.set_clock(noon() + std::time::Duration::from_secs(1));
    }

    /// Indexes the values of all events that sources name in `search`.
    async fn index_values(&self) {
        let fields = self.search_fields.load_full();
        while self.store.faults.index_values(Arc::clone(&fields), 10).await.expect("indexes") {}
    }

    async fn page(&self, path: &str) -> Answered {
        self.browse(Method::GET, path, &[], "").await
    }

    /// Logs in and returns the cookie.
    async fn log_in(&self, token: &str, name: &str) -> String {
        let form = format!("token={token}&name={name}&next=%2Fevents");
        let answer = self.browse(Method::POST, "/login", &[SAME_ORIGIN], &form).await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.text);
        assert_eq!(answer.header(header::LOCATION), "/events");
        let cookie = answer.header(header::SET_COOKIE);
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Lax"), "{cookie}");
        cookie.split(';').next().unwrap().to_owned()
    }
}

#[tokio::test]
async fn every_page_is_html_that_may_load_only_files_of_this_server() {
    let jobs = [("fee", JobState::Done(noon())), ("mail", JobState::Dead)];
    let server = server(vec![event("evt_1", &jobs), late_event("evt_2")]).await;
    let id = server.store.event("evt_1").await.summary.id.to_string();
    let pages = routes::<MemoryStore>().into_iter().filter(|route| {
        route.method == Method::GET && route.is_page && route.path != "/assets/{name}"
    });
    for route in pages.filter(|route| !route.path.starts_with("/endpoints/{id}")) {
        let path = route.path.replace("{id}", &id).replace("{name}", "stripe");
        let answer = server.page(&path).await;
        let kind = answer.header(header::CONTENT_TYPE).to_owned();
        let policy = answer.header(header::CONTENT_SECURITY_POLICY);
        assert!(
            policy.contains("default-src 'none'") && !policy.contains("unsafe"),
            "{path}: {policy}"
        );
        match answer.status {
            StatusCode::SEE_OTHER => {}
            _ => assert!(kind.starts_with("text/html"), "{path}: {} {kind}", answer.status),
        }
        for inline in ["<style", " style=", "javascript:", " onclick", "http-equiv"] {
            assert!(!answer.text.contains(inline), "{path} contains {inline}");
        }
        let scripts = answer.text.matches("<script").count();
        let files = answer.text.matches("<script type=\"module\" src=\"/assets/").count();
        assert_eq!(scripts, files, "{path} has a script that is no file");
        assert_eq!(answer.header(header::CACHE_CONTROL), "no-store", "{path}");
    }
}

#[tokio::test]
async fn text_of_a_sender_stays_text_on_every_page() {
    let hostile = [
        "<script>alert(1)</script>",
        "\"><img src=x onerror=alert(1)>",
        "{{ 7*7 }}",
        "</title><svg onload=alert(1)>",
        "evt_\u{202e}gpj.exe\u{2066}",
    ];
    for id in hostile {
        let mut new = event(id, &[("fee", JobState::Dead)]);
        new.event.body = json!({ "id": 1, "type": id, "x": [id] }).to_string();
        new.event.headers = format!("content-type: application/json\nx-sent: {id}");
        let server = server(vec![new]).await;
        let ours = server.store.event(id).await.summary.id.to_string();
        let tabs = ["pretty", "raw", "headers", "signature", "curl", "<b>"];
        let tabs = tabs.map(|tab| format!("/events/{ours}?tab={tab}"));
        let paths = ["/", "/events", "/dead"].map(str::to_owned).into_iter().chain(tabs);
        for path in paths.chain([format!("/events/{ours}/replay")]) {
            let page = server.page(&path.replace("<b>", "%3Cb%3E")).await;
            assert_eq!(page.status, StatusCode::OK, "{path}: {}", page.text);
            for mark in ["<script>alert", "<img", "<svg onload", "\u{202e}", "\u{2066}"] {
                assert!(!page.text.contains(mark), "{path} of {id:?} contains {mark:?}");
            }
        }
    }
}

#[tokio::test]
async fn tabs_share_a_rendering_for_a_second_and_an_action_ends_it() {
    // A rendering that outlives an action would make it look as if the action did nothing. A rendering
    // that is shared across rights would show buttons or values that the user must not have.
    let server = server_with(vec![event("evt_1", &[])], WithoutToken::Refused).await;
    let list = async |token: &str, known: &str| {
        let bearer = format!("Bearer {token}");
        let more = [("authorization", &*bearer), ("if-none-match", known)];
        server.browse(Method::GET, "/events", &more, "").await
    };
    let first = list("reader-token", "").await;
    assert!(first.text.contains("evt_1"), "{}", first.text);
    server.store.put(event("evt_2", &[("fee", JobState::Dead)])).await;

    let shared = list("reader-token", "").await;
    assert_eq!((shared.status, &shared.text), (StatusCode::OK, &first.text));
    let known = first.header(header::ETAG);
    let unchanged = list("reader-token", known).await;
    assert_eq!((unchanged.status, &*unchanged.text), (StatusCode::NOT_MODIFIED, ""));
    let other_rights = list("ops-token", known).await;
    assert!(other_rights.text.contains("evt_2"), "the rendering of another role was shown");

    server.shared_pages_end();
    let later = list("reader-token", known).await;
    assert!(later.text.contains("evt_2"), "a rendering was shared for longer than a second");

    server.store.put(event("evt_3", &[])).await;
    let id = server.store.event("evt_2").await.summary.id;
    let path = format!("/api/v1/events/{id}/discard");
    let ops = [("authorization", "Bearer ops-token"), ("content-type", "application/json")];
    let acted = server.browse(Method::POST, &path, &ops, "{\"reason\":\"known\"}").await;
    assert_eq!(acted.status, StatusCode::OK, "{}", acted.text);
    let after = list("reader-token", "").await;
    assert!(after.text.contains("evt_3"), "a rendering from before the action was shown");
}

#[tokio::test]
async fn a_form_that_is_sent_twice_acts_once() {
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
    let id = server.store.event("evt_1").await.summary.id.to_string();
    let path = format!("/events/{id}/replay");
    let question = server.page(&path).await;
    assert!(question.text.contains("fee would run."), "{}", question.text);
    let form = format!("plan={}&reason=mended", question.plan());
    let first = server.browse(Method::POST, &path, &[SAME_ORIGIN], &form).await;
    assert_eq!(first.status, StatusCode::SEE_OTHER, "{}", first.text);
    assert_eq!(server.store.job("evt_1").await.phase, Phase::Ready);

    let again = server.browse(Method::POST, &path, &[SAME_ORIGIN], &form).await;
    assert_eq!(again.header(header::LOCATION), first.header(header::LOCATION));
    assert_eq!(server.store.event("evt_1").await.actions.len(), 1, "the second form acted too");
    let other = format!("plan={}&reason=another", question.plan());
    let other = server.browse(Method::POST, &path, &[SAME_ORIGIN], &other).await;
    assert_eq!(other.status, StatusCode::CONFLICT, "the same form with other fields");
    let without = server.browse(Method::POST, &path, &[SAME_ORIGIN], "reason=x").await;
    assert_eq!(without.status, StatusCode::BAD_REQUEST, "a form without a plan");
}

#[tokio::test]
async fn an_action_whose_client_disconnects_is_recorded_and_its_form_acts_once() {
    // A browser whose button is pressed twice drops the first request and sends the form again. A client that
    // disconnects right after its request must not act without a record.
    let events = vec![event("evt_1", &[("fee", JobState::Dead)])];
    let server = server_with(events, WithoutToken::Refused).await;
    let id = server.store.event("evt_1").await.summary.id;
    let path = format!("/events/{id}/replay");
    let ops = [("authorization", "Bearer ops-token")];
    let question = server.browse(Method::GET, &path, &ops, "").await;
    let form = format!("plan={}", question.plan());
    let faults = &server.store.faults;
    let permits = faults.block_answers(Act::Replay);
    let before = faults.begun(Act::Replay);
    let begun = faults.until(|faults| faults.begun(Act::Replay) > before);
    let mut first = Box::pin(server.browse(Method::POST, &path, &ops, &form));
    tokio::select! {
        answer = &mut first => panic!("the action was not blocked: {}", answer.status),
        () = begun => {}
    }
    drop(first);
    permits.add_permits(10);
    let again = server.browse(Method::POST, &path, &ops, &form).await;
    assert_eq!(again.status, StatusCode::SEE_OTHER, "{}", again.text);
    server.unfinished.close();
    server.unfinished.wait().await;
    assert_eq!(server.store.event("evt_1").await.actions.len(), 1, "the second form acted too");
    let all = AuditFilter { limit: 10, ..AuditFilter::default() };
    let entries = faults.inner().audited(all).await.unwrap().items;
    let entries: Vec<_> = entries.iter().map(|entry| (&*entry.who, entry.status)).collect();
    assert_eq!(entries, [("ops", 303), ("ops", 303)], "each request is in the audit trail");
}

#[tokio::test]
async fn a_form_that_may_be_forgotten_does_not_act() {
    // A sent form is remembered for a day. A browser can send the form of an older page again.
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
    let id = server.store.event("evt_1").await.summary.id;
    let path = format!("/events/{id}/replay");
    let form_made_before = |hours: i64| {
        let seconds = (noon().as_second() - hours * 3_600).unsigned_abs();
        let plan = Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, seconds, 0));
        format!("plan={plan}")
    };
    for form in [form_made_before(13), form_made_before(30), format!("plan={}", Uuid::nil())] {
        let answer = server.browse(Method::POST, &path, &[SAME_ORIGIN], &form).await;
        assert_eq!(answer.status, StatusCode::CONFLICT, "{form}: {}", answer.text);
        assert!(server.store.event("evt_1").await.actions.is_empty(), "{form} acted");
    }
    let form = form_made_before(11);
    let answer = server.browse(Method::POST, &path, &[SAME_ORIGIN], &form).await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.text);
}

#[tokio::test]
async fn a_list_offers_a_plan_only_for_exactly_what_it_shows() {
    // A plan has no filter for copies: it would take the events without a copy too.
    let copied = NewEvent { copies: vec![noon()], ..event("evt_1", &[("fee", JobState::Dead)]) };
    let server = server(vec![copied, event("evt_2", &[])]).await;
    let page = server.page("/events?source=stripe").await.text;
    assert!(page.contains("/plans/replay?source=stripe"), "{page}");
    let page = server.page("/events?source=stripe&copied=true").await.text;
    assert!(page.contains("evt_1") && !page.contains("evt_2"), "{page}");
    assert!(!page.contains("/plans/"), "{page}");
}

#[tokio::test]
async fn an_event_with_a_dead_letter_offers_to_discard_it_in_any_status() {
    let jobs = [("fee", JobState::Dead), ("mail", JobState::Dead)];
    let server = server(vec![event("evt_1", &jobs)]).await;
    let discard = format!("/api/v1/jobs/{}/discard", server.store.job("evt_1").await.id);
    assert_eq!(server.post(&discard, json!({})).await.0, StatusCode::OK);
    let id = server.store.event("evt_1").await.summary.id;
    let page = server.page(&format!("/events/{id}")).await.text;
    assert!(page.contains("<span class=\"status discarded\">"), "{page}");
    let link = format!("href=\"/events/{id}/discard\"");
    assert!(page.contains(&link), "{page}");
    assert_eq!(
        server.post(&format!("/api/v1/events/{id}/discard"), json!({})).await.0,
        StatusCode::OK
    );
    let page = server.page(&format!("/events/{id}")).await.text;
    assert!(!page.contains(&link), "no dead letter is left: {page}");
}

#[tokio::test]
async fn a_page_is_not_sent_again_while_it_is_the_same() {
    let server = server(vec![event("evt_1", &[])]).await;
    let first = server.page("/events").await;
    let etag = first.header(header::ETAG).to_owned();
    let again = server.browse(Method::GET, "/events", &[("if-none-match", &etag)], "").await;
    assert_eq!((again.status, again.text.as_str()), (StatusCode::NOT_MODIFIED, ""));
    server.store.put(event("evt_2", &[])).await;
    server.shared_pages_end();
    let changed = server.browse(Method::GET, "/events", &[("if-none-match", &etag)], "").await;
    assert_eq!(changed.status, StatusCode::OK);
}

#[tokio::test]
async fn a_session_reads_acts_by_name_and_ends_at_logout() {
    let server =
        server_with(vec![event("evt_1", &[("fee", JobState::Dead)])], WithoutToken::Refused).await;
    let id = server.store.event("evt_1").await.summary.id.to_string();
    let stranger = server.page("/events?status=dead").await;
    assert_eq!(stranger.header(header::LOCATION), "/login?next=%2Fevents%3Fstatus%3Ddead");
    let wrong = server.browse(Method::POST, "/login", &[SAME_ORIGIN], "token=nope").await;
    assert_eq!(wrong.status, StatusCode::UNAUTHORIZED);
    assert!(wrong.header(header::SET_COOKIE).is_empty() && !wrong.text.contains("nope"));

    let foreign = [("sec-fetch-site", "cross-site")];
    let foreign = server.browse(Method::POST, "/login", &foreign, "token=ops-token").await;
    assert_eq!(foreign.status, StatusCode::FORBIDDEN, "another site logged the browser in");

    let cookie = server.log_in("ops-token", "anna").await;
    let with_cookie = ("cookie", cookie.as_str());
    let path = format!("/events/{id}/replay");
    let question = server.browse(Method::GET, &path, &[with_cookie], "").await;
    assert_eq!(question.status, StatusCode::OK, "{}", question.text);
    let form = format!("plan={}", question.plan());
    for foreign in [
        &[with_cookie][..],
        &[with_cookie, ("sec-fetch-site", "cross-site")],
        &[with_cookie, ("origin", "https://evil.example")],
    ] {
        let refused = server.browse(Method::POST, &path, foreign, &form).await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{foreign:?}");
    }
    assert_eq!(server.store.job("evt_1").await.phase, Phase::Dead);
    let acted = server.browse(Method::POST, &path, &[with_cookie, SAME_ORIGIN], &form).await;
    assert_eq!(acted.status, StatusCode::SEE_OTHER, "{}", acted.text);
    assert_eq!(server.store.event("evt_1").await.actions[0].who, "ops (anna)");

    // A logout needs no token, so one without a session must not write.
    let unknown = ("cookie", "hapax_session=unknown");
    let out = server.browse(Method::POST, "/logout", &[unknown, SAME_ORIGIN], "").await;
    assert_eq!(out.header(header::LOCATION), "/login");
    assert_eq!(server.store.faults.begun(Act::EndSession), 0);
    let out = server.browse(Method::POST, "/logout", &[with_cookie, SAME_ORIGIN], "").await;
    assert_eq!(out.header(header::LOCATION), "/login");
    let after = server.browse(Method::GET, "/events", &[with_cookie], "").await;
    assert_eq!(after.status, StatusCode::SEE_OTHER, "the cookie still works after the logout");
}

#[tokio::test]
async fn a_form_that_was_held_back_does_not_act_after_the_logout() {
    // The session is open when the headers arrive, and has ended when the body arrives.
    let events = vec![event("evt_1", &[("fee", JobState::Dead)])];
    let server = server_with(events, WithoutToken::Refused).await;
    let id = server.store.event("evt_1").await.summary.id;
    let cookie = server.log_in("ops-token", "anna").await;
    let (body, is_read, sender) = HeldBody::with_sender();
    let request = Request::post(format!("/events/{id}/replay"))
        .header("host", "localhost")
        .header("cookie", &cookie)
        .header(SAME_ORIGIN.0, SAME_ORIGIN.1)
        .body(body)
        .unwrap();
    let answer = tokio::spawn(server.router.clone().oneshot(request));
    is_read.await.unwrap();
    let with_cookie = ("cookie", cookie.as_str());
    server.browse(Method::POST, "/logout", &[with_cookie, SAME_ORIGIN], "").await;
    sender.send(format!("plan={}", uuid::Uuid::now_v7()).into()).unwrap();
    let answer = answer.await.unwrap().unwrap();
    assert!(server.store.event("evt_1").await.actions.is_empty(), "{answer:?}");
    assert_eq!(server.store.job("evt_1").await.phase, Phase::Dead);
}

#[tokio::test]
async fn a_request_of_the_api_that_was_held_back_does_not_act_after_the_logout() {
    // The session is open when the headers arrive and has ended when the body arrives, here in a request of the API.
    let events = vec![event("evt_1", &[("fee", JobState::Dead)])];
    let server = server_with(events, WithoutToken::Refused).await;
    let cookie = server.log_in("ops-token", "anna").await;
    let (body, is_read, sender) = HeldBody::with_sender();
    let request = Request::post("/api/v1/events/evt_1/replay")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("cookie", &cookie)
        .header(SAME_ORIGIN.0, SAME_ORIGIN.1)
        .body(body)
        .unwrap();
    let answer = tokio::spawn(server.router.clone().oneshot(request));
    is_read.await.unwrap();
    let with_cookie = ("cookie", cookie.as_str());
    server.browse(Method::POST, "/logout", &[with_cookie, SAME_ORIGIN], "").await;
    sender.send("{}".into()).unwrap();
    assert_eq!(answer.await.unwrap().unwrap().status(), StatusCode::UNAUTHORIZED);
    assert!(server.store.event("evt_1").await.actions.is_empty());
    assert_eq!(server.store.job("evt_1").await.phase, Phase::Dead);
}

#[tokio::test(start_paused = true)]
async fn a_request_of_the_api_whose_body_never_ends_is_refused() {
    // Without a deadline such a request keeps its connection for ever. The clock moves on while the server waits.
    let server = server_with(Vec::new(), WithoutToken::Refused).await;
    let (body, is_read, _sender) = HeldBody::with_sender();
    let request = Request::post("/api/v1/events/evt_1/replay")
        .header("authorization", "Bearer ops-token")
        .header("content-type", "application/json")
        .body(body)
        .unwrap();
    let answer = tokio::spawn(server.router.clone().oneshot(request));
    is_read.await.unwrap();
    assert_eq!(answer.await.unwrap().unwrap().status(), StatusCode::REQUEST_TIMEOUT);
}

#[tokio::test]
async fn the_name_of_a_login_looks_like_no_other_actor() {
    // The audit trail names the token. The name after the token is the one that the user typed at
    // login.
    let server = server_with(Vec::new(), WithoutToken::Refused).await;
    server.log_in("ops-token", "anna%29+root+%28%E2%80%AEboss").await;
    let all = AuditFilter { limit: 1, ..AuditFilter::default() };
    let entries = server.store.faults.inner().audited(all).await.unwrap().items;
    assert_eq!(entries[0].who, "ops (anna root boss)");
}

#[tokio::test]
async fn the_audit_trail_has_every_action_and_every_refusal() {
    let server =
        server_with(vec![event("evt_1", &[("fee", JobState::Dead)])], WithoutToken::Refused).await;
    let path = "/api/v1/events/evt_1/replay";
    server.post_as(Some("reader-token"), path, json!({})).await;
    server.post_as(None, path, json!({})).await;
    server.post_as(Some("ops-token"), path, json!({})).await;
    let cookie = server.log_in("root-token", "").await;
    let all = AuditFilter { limit: 10, ..AuditFilter::default() };
    let entries = server.store.faults.inner().audited(all).await.unwrap().items;
    let entries: Vec<_> = entries.iter().map(|entry| (&*entry.who, entry.status)).collect();
    assert_eq!(entries, [("root", 303), ("ops", 200), ("", 401), ("reader", 403)]);
    let page = server.browse(Method::GET, "/audit", &[("cookie", &cookie)], "").await;
    assert!(page.text.contains("POST /api/v1/events/{id}/replay"), "{}", page.text);
}

#[tokio::test]
async fn a_flood_of_wrong_tokens_fills_no_audit_trail() {
    // Above 20 wrong tokens a second the answer is 429. A record of each would let any client fill the disk.
    let server = server_with(Vec::new(), WithoutToken::Refused).await;
    let mut limited = 0;
    for _ in 0..300 {
        let path = "/api/v1/events/evt_1/replay";
        match server.post_as(Some("wrong-token"), path, json!({})).await.0 {
            StatusCode::UNAUTHORIZED => {}
            StatusCode::TOO_MANY_REQUESTS => limited += 1,
            other => panic!("{other}"),
        }
    }
    assert!(limited > 100, "{limited} requests were limited");
    let all = AuditFilter { limit: 400, ..AuditFilter::default() };
    let recorded = server.store.faults.inner().audited(all.clone()).await.unwrap().items.len();
    assert!((1..100).contains(&recorded), "{recorded} refusals were recorded");
    // The flood must not keep the refusal of a known token out of the trail.
    let path = "/api/v1/events/evt_1/replay";
    server.post_as(Some("reader-token"), path, json!({})).await;
    let newest = server.store.faults.inner().audited(all).await.unwrap().items.remove(0);
    assert_eq!((&*newest.who, newest.status), ("reader", 403));
}

#[tokio::test]
async fn each_route_is_open_to_exactly_the_roles_that_it_needs() {
    use Access::{Admin, Claim, Operate, Publish, Read};
    let may = [
        ("", &[][..]),
        ("worker-token", &[Claim]),
        ("app-token", &[Publish]),
        ("reader-token", &[Read]),
        ("ops-token", &[Read, Operate]),
        ("root-token", &[Read, Operate, Admin, Publish, Claim]),
    ];
    let server = server_with(vec![event("evt_1", &[])], WithoutToken::Refused).await;
    let id = server.store.event("evt_1").await.summary.id.to_string();
    for route in routes::<MemoryStore>() {
        let Some(access) = route.access else { continue };
        let path =
            route.path.replace("{id}", &id).replace("{name}", "stripe").replace("{job}", &id);
        for (token, allowed) in &may {
            let bearer = format!("Bearer {token}");
            let more = [("authorization", bearer.as_str()), ("content-type", "application/json")];
            let more = if token.is_empty() { &more[1..] } else { &more[..] };
            let answer = server.browse(route.method.clone(), &path, more, "").await;
            let is_refused = match answer.status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => true,
                StatusCode::SEE_OTHER => answer.header(header::LOCATION).starts_with("/login"),
                _ => false,
            };
            // A claim is checked a second time, against the handler that the request names.
            if access == Claim && !is_refused {
                continue;
            }
            let expected = !allowed.contains(&access);
            assert_eq!(
                is_refused, expected,
                "{} {path} with {token:?}: {}",
                route.method, answer.status
            );
        }
    }
}

#[tokio::test]
async fn redacted_values_are_shown_only_to_tokens_that_permit_payloads() {
    let mut new = event("evt_1", &[]);
    new.event.body =
        json!({ "id": "evt_1", "email": "anna@example.com", "customer": "cus_9" }).to_string();
    new.event.headers = "content-type: application/json\nX-User: anna".to_owned();
    let server = server_with(vec![new], WithoutToken::Refused).await;
    server.index_values().await;
    for (token, sees) in [("reader-token", false), ("ops-token", false), ("root-token", true)] {
        let bearer = format!("Bearer {token}");
        let more = [("authorization", bearer.as_str())];
        for path in ["/api/v1/events/evt_1", "/events/evt_1"] {
            let answer = server.browse(Method::GET, path, &more, "").await;
            assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text);
            assert_eq!(answer.text.contains("anna"), sees, "{path} with {token}: {}", answer.text);
            assert_eq!(answer.text.contains("[redacted]"), !sees, "{path} with {token}");
        }
        // Search results would reveal a masked value letter by letter; the index would reveal it as a whole.
        for text in ["anna@e", "anna@example.com"] {
            for path in ["/api/v1/events", "/events"] {
                let path = format!("{path}?q={text}");
                let answer = server.browse(Method::GET, &path, &more, "").await;
                assert_eq!(answer.status, StatusCode::OK, "{path} with {token}: {}", answer.text);
                let found = answer.text.contains("payout.paid") || answer.text.contains("evt_1");
                assert_eq!(found, sees, "{path} with {token}: {}", answer.text);
            }
        }
        // Every caller finds values that are not masked.
        for text in ["cus_9", "evt_1", "evt_"] {
            let path = format!("/api/v1/events?q={text}");
            let answer = server.browse(Method::GET, &path, &more, "").await;
            assert!(answer.text.contains("evt_1"), "{path} with {token}: {}", answer.text);
        }
    }
    for (token, count) in [("ops-token", 0), ("root-token", 1)] {
        let bearer = format!("Bearer {token}");
        let more = [("authorization", bearer.as_str()), ("content-type", "application/json")];
        let plan = r#"{"q":"anna@e","dry_run":true}"#;
        let answer = server.browse(Method::POST, "/api/v1/events/replay", &more, plan).await;
        let counted: serde_json::Value = serde_json::from_str(&answer.text).unwrap();
        assert_eq!(counted["count"], count, "{token}: {}", answer.text);
    }
}

#[tokio::test]
async fn an_event_leads_to_the_events_of_the_same_customer_but_not_by_a_masked_value() {
    // A count of a masked value, or a link with it, would reveal the value to a reader without `payload`.
    let new = |n: usize, customer: &str| {
        let mut new = event(&format!("evt_{n}"), &[]);
        let body = json!({ "id": n, "customer": customer, "email": "anna@example.com" });
        new.event.body = body.to_string();
        new
    };
    let mut events: Vec<_> = (0..3).map(|n| new(n, "cus/9&a")).collect();
    events.extend((3..110).map(|n| new(n, "cus_many")));
    let server = server_with(events, WithoutToken::Refused).await;
    let shown = async |token: &str, path: &str| {
        let bearer = format!("Bearer {token}");
        let more = [("authorization", bearer.as_str())];
        let answer = server.browse(Method::GET, path, &more, "").await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text);
        answer.text
    };
    // The event itself is counted even before its values are indexed.
    assert!(shown("reader-token", "/events/evt_0").await.contains("same customer: 1<"));
    server.index_values().await;
    server.shared_pages_end();
    let page = shown("reader-token", "/events/evt_0").await;
    let link = "/events?source=stripe&amp;q=cus%2F9%26a";
    assert!(page.contains("same customer: 3<") && page.contains(link), "{page}");
    assert!(!page.contains("same email"), "{page}");
    assert!(shown("root-token", "/events/evt_0").await.contains("same email: 100+"));
    assert!(shown("root-token", "/events/evt_5").await.contains("same customer: 100+"));
    for (token, fields) in [("reader-token", 1), ("root-token", 2)] {
        let text = shown(token, "/api/v1/events/evt_0").await;
        let event: serde_json::Value = serde_json::from_str(&text).unwrap();
        let same = event["same_values"].as_array().expect("a list");
        let expected = json!({
            "field": "/customer", "value": "cus/9&a", "event_count": 3, "has_more": false,
        });
        assert_eq!((same.len(), &same[0]), (fields, &expected), "{token}");
    }
    // The link opens the events that were counted.
    let list = shown("reader-token", "/events?source=stripe&q=cus%2F9%26a").await;
    for n in 0..4 {
        assert_eq!(list.contains(&format!("evt_{n}")), n < 3, "evt_{n}: {list}");
    }
}

#[tokio::test]
async fn the_overview_counts_the_nodes_that_run_and_names_a_missing_one() {
    let server = server(vec![event("evt_1", &[])]).await;
    let check_in = async |number: u128, seconds_ago: u64| {
        server.store.set_clock(noon() - std::time::Duration::from_secs(seconds_ago));
        let name = format!("host-{number}<b>:8080");
        let lease = std::time::Duration::from_secs(30);
        let node = CheckIn { node: Uuid::from_u128(number), name, lease, handlers: Vec::new() };
        server.store.faults.check_in(node).await.expect("checks in");
        server.store.set_clock(noon());
    };
    check_in(2, 10).await;
    let page = server.page("/").await.text;
    assert!(page.contains("nodes 2/2,") && !page.contains("is missing"), "{page}");
    check_in(3, 31).await;
    server.shared_pages_end();
    server.store.set_clock(noon() + std::time::Duration::from_secs(2));
    let page = server.page("/").await.text;
    assert!(page.contains("nodes 2/3,") && page.contains("host-3&#60;b&#62;:8080"), "{page}");
    let (status, nodes) = server.get("/api/v1/nodes").await;
    assert_eq!(status, StatusCode::OK);
    let alive: Vec<_> = nodes["items"].as_array().unwrap().iter().map(|it| &it["alive"]).collect();
    assert_eq!(alive, [true, true, false], "{nodes}");
    // A node that was shut down is not missing.
    server.store.faults.check_out(Uuid::from_u128(3)).await.expect("checks out");
    let (_, nodes) = server.get("/api/v1/nodes").await;
    assert_eq!(nodes["items"].as_array().unwrap().len(), 2, "{nodes}");
}

#[tokio::test]
async fn a_source_names_its_secrets_by_reference_and_the_one_that_the_sender_uses() {
    let server = server(vec![event("evt_1", &[])]).await;
    let used = |secret: &str, second: Option<i64>| SecretUse {
        tenant: Tenant::new("default"),
        source: SourceName::new("stripe"),
        verifier: Verifier { scheme: "stripe".to_owned(), secret: secret.to_owned() },
        used_at: second.map(|second| noon() - std::time::Duration::from_secs(second as u64)),
    };
    let uses = vec![used("env:OLD", Some(900)), used("env:<NEW>", Some(60)), used("env:X", None)];
    server.store.faults.note_secrets(uses).await.expect("notes");
    let page = server.page("/sources/stripe").await.text;
    let row = |name: &str| {
        let (_, rest) = page.split_once(name).unwrap_or_else(|| panic!("{name}: {page}"));
        rest.split("</tr>").next().unwrap().to_owned()
    };
    assert!(row("env:&#60;NEW&#62;").contains("the sender signs with it"), "{page}");
    let old = row("env:OLD");
    assert!(old.contains("11:45:00") && !old.contains("the sender signs with it"), "{old}");
    assert!(row("env:X").contains("never"), "{page}");
    let (_, secrets) = server.get("/api/v1/sources/stripe/secrets").await;
    let first = json!({
        "tenant": "default", "secret": "env:<NEW>", "scheme": "stripe",
        "known_since": "2026-03-01T12:00:00Z", "last_used_at": "2026-03-01T11:59:00Z",
        "signed_last": true, "until": null, "configured": false,
    });
    assert_eq!(secrets["items"][0], first, "{secrets}");
}

#[tokio::test]
async fn a_configured_source_has_a_page_and_a_row_before_its_first_event() {
    // A source whose sender never reached this server is the one that an operator looks for.
    let server = server_with(vec![event("evt_1", &[])], WithoutToken::Refused).await;
    let reader = [("authorization", "Bearer reader-token")];
    let page = server.browse(Method::GET, "/", &reader, "").await.text;
    assert!(page.contains("<a href=\"/sources/quiet\"><bdi>quiet</bdi></a>"), "{page}");
    let page = server.browse(Method::GET, "/sources/quiet", &reader, "").await;
    assert_eq!(page.status, StatusCode::OK, "{}", page.text);
    assert!(page.text.contains("<code>/webhooks/quiet</code>"), "{}", page.text);
    let unknown = server.browse(Method::GET, "/sources/nowhere", &reader, "").await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_window_of_any_length_has_an_answer() {
    let server = server(vec![event("evt_1", &[])]).await;
    for path in ["/api/v1/stats", "/", "/sources/stripe", "/duplicates"] {
        for window in ["18446744073709551615", "18446744073709551615ms", "1ms"] {
            let answer = server.page(&format!("{path}?window={window}")).await;
            let is_answered = matches!(answer.status, StatusCode::OK | StatusCode::BAD_REQUEST);
            assert!(is_answered, "{path} {window}: {} {}", answer.status, answer.text);
        }
    }
}

#[tokio::test]
async fn a_delivery_that_waits_can_be_given_up_once_and_its_page_says_who_did_it() {
    let server = server_with(Vec::new(), WithoutToken::Refused).await;
    let dead = server.things("acme", "https://shop.example/in").await.delivery;
    let waiting = NewMessage::new("acme.paid", json!({})).with_tenant("acme");
    server.store.faults.publish(waiting).await.expect("publishes");
    let cookie = server.log_in("ops-token", "anna").await;
    let with_cookie = ("cookie", cookie.as_str());
    let get = async |path: &str| server.browse(Method::GET, path, &[with_cookie], "").await.text;
    let page = get(&format!("/deliveries/{dead}")).await;
    assert!(!page.contains("/skip"), "a dead delivery without a key keeps nothing waiting: {page}");

    let list = get("/api/v1/deliveries?status=waiting").await;
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let path = format!("/deliveries/{}", list["items"][0]["id"].as_str().expect("a delivery"));
    let skip = format!("{path}/skip");
    assert!(get(&path).await.contains(&skip));
    let question = server.browse(Method::GET, &skip, &[with_cookie], "").await;
    assert!(question.text.contains("It is waiting. The endpoint does not get it."));
    let form = format!("plan={}&reason=not+wanted", question.plan());
    let post =
        async || server.browse(Method::POST, &skip, &[with_cookie, SAME_ORIGIN], &form).await;
    for _ in 0..2 {
        let answer = post().await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.text);
    }
    let page = get(&path).await;
    assert!(page.contains("<span class=\"status cancelled\">"), "{page}");
    assert_eq!(page.matches("<bdi>ops (anna)</bdi>: skip").count(), 1, "{page}");
    assert!(page.contains("not wanted") && !page.contains(&skip), "{page}");
    let question = get(&skip).await;
    assert!(question.contains(" is cancelled: there is nothing to give up now."), "{question}");
}

#[tokio::test]
async fn an_endpoint_shows_the_ages_of_its_secrets_and_that_it_fails() {
    // An endpoint whose circuit is open gets nothing: to call it active would hide that.
    let server = server(Vec::new()).await;
    let endpoint = server.things("acme", "https://shop.example/in").await.endpoint;
    let path = format!("/endpoints/{endpoint}");
    for page in [&*path, "/endpoints"] {
        let page = server.page(page).await.text;
        assert!(page.contains("<span class=\"status active\">active</span>"), "{page}");
    }
    assert!(server.page(&path).await.text.contains("their age is not known"));
    let at = |text: &str| text.parse().expect("a time");
    server
        .change_endpoint(endpoint, |settings| {
            let newest = SecretAge::new(at("2026-02-03T04:05:06Z"));
            settings.secret_ages = SecretAge::rotated(
                &[SecretAge::new(at("2026-01-02T03:04:05Z"))],
                std::time::Duration::from_secs(3_600),
                newest.since,
            );
        })
        .await;
    server.fail_until_open("acme").await;
    server.shared_pages_end();
    let page = server.page(&path).await.text;
    assert!(page.contains("<span class=\"status failing\">failing</span>"), "{page}");
    for time in ["2026-02-03 04:05:06Z", "2026-01-02 03:04:05Z", "2026-02-03 05:05:06Z"] {
        assert!(page.contains(time), "{time}: {page}");
    }
    let list = server.page("/endpoints").await.text;
    assert!(list.contains("<span class=\"status failing\">failing</span>"), "{list}");
    assert!(list.contains("2026-02-03 04:05:06Z"), "{list}");
}

#[tokio::test]
async fn copies_are_counted_by_their_wait() {
    let server = server(Vec::new()).await;
    let mut figures = TrafficFigures::default();
    (figures.counts.new, figures.counts.copies) = (2, 7);
    for (seconds, count) in [(2, 3), (8, 2), (4_000, 1), (9_999_999, 1)] {
        let bucket = bucket_of(std::time::Duration::from_secs(seconds));
        figures.tallies.count(TallyKind::Copy, bucket, count);
    }
    let count = TrafficCount { source: SourceName::new("stripe"), at: noon(), figures };
    server.store.faults.record_traffic(Uuid::nil(), vec![count]).await.expect("records");
    let page = server.page("/duplicates").await.text;
    assert!(page.contains("5 within 10 s, 1 within 6 h, 1 later"), "{page}");
    let (_, stats) = server.get("/api/v1/stats?source=stripe").await;
    let expected = json!([
        { "within_seconds": 10, "copies": 5 },
        { "within_seconds": 21_600, "copies": 1 },
        { "within_seconds": null, "copies": 1 },
    ]);
    assert_eq!(stats["copy_waits"], expected, "{stats}");
}

#[tokio::test]
async fn dead_letters_are_grouped_by_error_over_all_pages() {
    let dead = |n: usize| event(&format!("evt_{n}"), &[("mail", JobState::Dead)]);
    let server = server((0..7).map(dead).collect()).await;
    let page = server.page("/dead?limit=2").await.text;
    assert!(
        page.contains(
            "<td class=\"n\">7</td><td><a href=\"/dead?error=no\"><bdi>no</bdi></a></td>"
        ),
        "{page}"
    );
    assert!(page.contains("7 dead letters, 1 error."), "{page}");
    let page = server.page("/dead?limit=2&handler=fee").await.text;
    assert!(page.contains("There is no dead letter") && !page.contains("By error"), "{page}");
    let (_, dead) = server.get("/api/v1/dead?source=stripe").await;
    assert_eq!((&dead["count"], &dead["error_count"]), (&json!(7), &json!(1)), "{dead}");
    let group = json!({
        "error": "no", "count": 7,
        "first_at": "2026-03-01T12:00:00Z", "last_at": "2026-03-01T12:00:00Z",
    });
    assert_eq!(dead["items"], json!([group]));
}

#[tokio::test]
async fn a_number_of_jobs_leads_to_exactly_these_jobs() {
    let server = server(vec![
        event("evt_ready", &[("fee", JobState::Ready)]),
        event("evt_no", &[("mail", JobState::Dead)]),
    ])
    .await;
    let other = event("evt_other", &[("mail", JobState::Ready)]);
    let sent = other.event.clone();
    server.store.put(other).await;
    let error = "other <b>&=é".to_owned();
    let died = Outcome::Failed { error, retry: Retry::Never, answer: None };
    server.store.attempt(&sent, "mail", noon(), died).await;
    server.store.set_clock(noon());
    let shows = async |path: &str, expected: &[&str]| {
        let page = server.page(path).await;
        assert_eq!(page.status, StatusCode::OK, "{path}: {}", page.text);
        for id in ["evt_ready", "evt_no", "evt_other"] {
            assert_eq!(
                page.text.contains(id),
                expected.contains(&id),
                "{path}, {id}: {}",
                page.text
            );
        }
        page.text
    };
    let unescaped = |text: &str| text.replace("&#38;", "&").replace("&amp;", "&");
    let link_of = |page: &str, begin: &str, text: &str| {
        let mut links = page.split("href=\"").filter(|link| link.starts_with(begin));
        let link =
            links.find(|link| link.contains(text)).unwrap_or_else(|| panic!("{text}: {page}"));
        unescaped(link.split('"').next().unwrap())
    };
    let dead = shows("/dead", &["evt_no", "evt_other"]).await;
    shows(&link_of(&dead, "/dead?error=", "<bdi>no<"), &["evt_no"]).await;
    let page = shows(&link_of(&dead, "/dead?error=", "<bdi>other"), &["evt_other"]).await;
    assert!(!page.contains("/plans/"), "a plan has no filter for errors: {page}");
    let of_fee = link_of(&dead, "/dead?source=stripe", "<bdi>stripe<");
    shows(&of_fee, &["evt_no", "evt_other"]).await;
    let handlers = server.page("/handlers").await.text;
    let ready = link_of(&handlers, "/jobs?source=stripe&amp;handler=fee", ">1<");
    assert!(ready.ends_with("&status=ready"), "{ready}");
    shows(&ready, &["evt_ready"]).await;
    let source = server.page("/sources/stripe").await.text;
    assert_eq!(link_of(&source, "/jobs?", ">1</a> ready"), ready);
    shows("/jobs?status=dead", &["evt_no", "evt_other"]).await;
    shows("/jobs?forced=true", &[]).await;

    assert!(server.page("/").await.text.contains(" 0 forced,"));
    let figures = TrafficFigures {
        counts: TrafficCounts { new: 1, forced: 2, ..TrafficCounts::default() },
        ..TrafficFigures::default()
    };
    let count = TrafficCount { source: SourceName::new("stripe"), at: noon(), figures };
    server.store.faults.record_traffic(Uuid::from_u128(2), vec![count]).await.unwrap();
    server.shared_pages_end();
    let page = server.page("/").await.text;
    let forced = "<a href=\"/jobs?forced=true&amp;status=done\">2 forced</a>";
    assert!(page.contains(forced), "{page}");
}

#[tokio::test]
async fn everything_of_a_source_that_is_not_configured_any_more_is_masked() {
    let arrived = noon() - std::time::Duration::from_secs(3600);
    let mut gone = SignedEvent::new("gone", "evt_1", arrived);
    gone.body = json!({ "id": "evt_1", "email": "anna@example.com" }).to_string();
    gone.headers = "X-User: anna".to_owned();
    let gone = NewEvent { event: gone, jobs: Vec::new(), copies: Vec::new() };
    let server = server_with(vec![gone], WithoutToken::Refused).await;
    for (token, sees) in [("reader-token", false), ("root-token", true)] {
        let bearer = format!("Bearer {token}");
        let more = [("authorization", bearer.as_str())];
        let answer = server.browse(Method::GET, "/api/v1/events/evt_1", &more, "").await;
        assert_eq!(answer.text.contains("anna"), sees, "{token}: {}", answer.text);
    }
}

#[tokio::test]
async fn the_overview_plots_what_was_recorded() {
    let server = server(vec![event("evt_1", &[])]).await;
    let before = server.page("/").await.text;
    assert!(before.contains("7 failed verifications"), "{before}");
    let mut figures = TrafficFigures {
        counts: TrafficCounts {
            new: 3,
            copies: 2,
            rejected: 1,
            unavailable: 4,
            ..TrafficCounts::default()
        },
        gauges: Gauges { waiting: 12, ..Gauges::default() },
        ..TrafficFigures::default()
    };
    figures.tallies.count(TallyKind::Ack, 40, 5);
    let at = noon() - std::time::Duration::from_secs(300);
    let count = TrafficCount { source: hapax_core::SourceName::new("stripe"), at, figures };
    server
        .store
        .faults
        .inner()
        .record_traffic(uuid::Uuid::from_u128(7), vec![count])
        .await
        .unwrap();
    server.shared_pages_end();
    let page = server.page("/").await.text;
    assert!(
        page.contains("<path class=\"rejected\" d=\"M")
            && page.contains("<td>3</td><td>2</td><td>1</td>"),
        "{page}"
    );
    assert!(page.contains("4 × 503 in 1h"), "{page}");
    assert!(page.contains("40.0 % (40.0 %)"), "the share of copies, and the usual one: {page}");
    assert!(page.contains("<b class=\"ack\">ack p99</b>, at most 16"), "{page}");
    assert!(page.contains("<b class=\"waiting\">waiting</b> jobs, at most 12"), "{page}");
    let too_many = server.page("/api/v1/history?from=365d&step=1m").await;
    assert_eq!(too_many.status, StatusCode::BAD_REQUEST);
}

/// The most bytes of the first page with its style sheet and its script, in the worst hour.
const FIRST_PAGE_BYTES_MAX: usize = 45_000;

#[tokio::test]
async fn the_first_page_stays_small_with_twenty_busy_sources_in_every_minute() {
    // Each source, each minute and each alert adds markup, so the page grows with all of them.
    let server = server(vec![event("evt_1", &[])]).await;
    let mut figures = TrafficFigures {
        counts: TrafficCounts {
            new: 123_456,
            copies: 2_345,
            rejected: 1_234,
            ..TrafficCounts::default()
        },
        gauges: Gauges { waiting: 12_345, ..Gauges::default() },
        ..TrafficFigures::default()
    };
    figures.tallies.count(TallyKind::Ack, 40, 5);
    let mut counts = Vec::new();
    for minute in 0..60 {
        let at = noon() - std::time::Duration::from_secs(minute * 60);
        for source in 0..20 {
            let source = SourceName::new(format!("a-source-of-usual-length-{source}"));
            counts.push(TrafficCount { source, at, figures: figures.clone() });
        }
    }
    let traffic = server.store.faults.inner();
    traffic.record_traffic(Uuid::from_u128(7), counts).await.expect("records");
    server.shared_pages_end();
    let page = server.page("/").await.text;
    assert_eq!(page.matches("a-source-of-usual-length-19</bdi>").count(), 1, "{page}");
    assert!(page.matches("<tr data-x=").count() >= 59, "{page}");
    let mut bytes = page.len();
    for name in ["style.css\"", "pages.js\""] {
        let end = page.find(name).expect("the page loads it") + name.len() - 1;
        let start = page[..end].rfind('"').expect("a quote") + 1;
        bytes += server.page(&page[start..end]).await.text.len();
    }
    assert!(bytes < FIRST_PAGE_BYTES_MAX, "{bytes} bytes, {} of them HTML", page.len());
}

#[tokio::test]
async fn a_source_that_went_silent_keeps_its_row_on_the_overview() {
    // The source sent nothing in the window of one hour, and it has no job.
    let server = server(Vec::new()).await;
    let at = noon() - std::time::Duration::from_secs(3 * 3_600);
    let last_arrival = at.as_second().unsigned_abs();
    let figures = TrafficFigures {
        counts: TrafficCounts { new: 3, ..TrafficCounts::default() },
        gauges: Gauges { last_arrival, ..Gauges::default() },
        ..TrafficFigures::default()
    };
    let count = TrafficCount { source: SourceName::new("quiet"), at, figures };
    let traffic = server.store.faults.inner();
    traffic.record_traffic(Uuid::from_u128(7), vec![count]).await.expect("records");
    let page = server.page("/").await.text;
    let (_, row) = page.split_once("<bdi>quiet</bdi>").unwrap_or_else(|| panic!("{page}"));
    let row = row.split("</tr>").next().unwrap();
    assert!(row.contains("09:00:"), "the last arrival is shown: {row}");
    assert!(!page.contains("No event has arrived"), "{page}");
}

#[tokio::test]
async fn an_address_without_a_page_answers_a_browser_with_a_page() {
    // A link from an old bookmark ends here. Other clients get a problem in JSON.
    let server = server(Vec::new()).await;
    let answer = server.page("/event").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    assert!(answer.header(header::CONTENT_TYPE).starts_with("text/html"), "{}", answer.text);
    assert!(answer.text.contains("Back to the overview"), "{}", answer.text);
    answer.header(header::CONTENT_SECURITY_POLICY);
    let (status, problem) = server.get("/event").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(problem["type"], "urn:hapax:problem:not_found", "{problem}");
}

#[tokio::test]
async fn an_alert_links_to_what_it_is_about() {
    // 7 requests of stripe failed verification, and one job of fee is dead.
    let server = server(vec![event("evt_1", &[("fee", JobState::Dead)])]).await;
    let (_, alerts) = server.get("/api/v1/alerts").await;
    for path in ["/", "/alerts"] {
        let page = server.page(path).await.text;
        let link = "<a href=\"/dead?source=stripe&#38;handler=fee\">dead letters</a>";
        assert!(page.contains(link), "{path}: {alerts}: {page}");
        assert!(page.contains("<code>hapax dead list</code>"), "{path}: {page}");
    }
    let page = server.page("/").await.text;
    assert!(
        page.contains("<a href=\"/sources/stripe#rejections\">7 for <bdi>stripe</bdi></a>"),
        "{page}"
    );
}
