//! The records of requests that operators see: which were refused, and which secret accepted the others.

use crate::common::hapax;
use crate::support::sender::event;
use crate::support::{House, Sender, until};

const SECRET: &str = "whsec_of_the_environment";

#[test]
fn refused_requests_are_listed_with_what_they_claim_and_stay_text() {
    // The id in a forged request contains markup and a character that reverses the direction of text.
    let house = House::new(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"env:STRIPE\"]\nunverified_limit = \"off\"\n",
    )
    .env("STRIPE", SECRET);
    let server = house.start();
    let forged = Sender::stripe("whsec_of_somebody_else");
    let hostile = "evt_<script>alert(1)</script>\u{202e}";
    assert_eq!(server.ask(forged.event(hostile)).status, 401);
    let unsigned = Sender::stripe(SECRET).request(event("evt_1")).without("stripe-signature");
    assert_eq!(server.ask(unsigned.bytes()).status, 401);
    let listed = server.admin_get("/api/v1/sources/stripe/rejections").json();
    let items = listed["items"].as_array().expect("a list");
    assert_eq!(items.len(), 2, "{listed}");
    assert_eq!((&items[0]["reason"], &items[0]["claimed_id"]), (&"missing".into(), &().into()));
    assert_eq!(
        (&items[1]["reason"], &items[1]["claimed_id"]),
        (&"signature".into(), &hostile.into())
    );
    assert_eq!(items[1]["remote"], "127.0.0.1");
    let page = server.admin_get("/sources/stripe").text();
    assert!(page.contains("Refused requests") && page.contains("evt_&#60;script&#62;"), "{page}");
    assert!(!page.contains("<script>alert") && !page.contains('\u{202e}'), "{page}");
    // A source that never received a request.
    let quiet = server.admin_get("/api/v1/sources/github/rejections").json();
    assert_eq!(quiet["items"].as_array().map(Vec::len), Some(0), "{quiet}");
    // The records survive a restart.
    server.stop();
    let server = house.start();
    let listed = server.admin_get("/api/v1/sources/stripe/rejections").json();
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(2), "{listed}");
}

#[test]
fn the_token_of_a_refused_request_is_shown_nowhere() {
    // A sender that still uses the token from before a rotation, or the token of another project: the token
    // is wrong here and may be right elsewhere.
    let old = "glpat-canary-of-another-project";
    let house = House::new(
        "[sources.gitlab]\nprovider = \"gitlab\"\nsecrets = [\"glpat-the-right-one\"]\n",
    );
    let server = house.start();
    let sender = Sender::new("gitlab", old, "/webhooks/gitlab");
    let request = sender.request(r#"{"object_kind":"push"}"#).with("x-gitlab-event-uuid", "uuid-1");
    assert!(request.head().contains(old), "the token is sent as it is");
    assert_eq!(server.ask(request.bytes()).status, 401);
    let listed = server.admin_get("/api/v1/sources/gitlab/rejections").json();
    assert_eq!(listed["items"][0]["reason"], "signature", "{listed}");
    let admin = format!("http://{}", server.admin);
    let printed = hapax(&["rejections", "gitlab"]).env("HAPAX_ADMIN", &admin).run();
    assert!(printed.stdout.contains("signature"), "{printed:?}");
    let page = server.admin_get("/sources/gitlab").text();
    assert!(page.contains("Refused requests"), "{page}");
    let logged = server.stop();
    for text in [listed.to_string(), printed.stdout, page, logged] {
        assert!(!text.contains("canary"), "{text}");
    }
}

#[test]
fn a_flood_of_forged_requests_is_sampled() {
    let house = House::new(
        "[sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"env:STRIPE\"]\nunverified_limit = \"off\"\n",
    )
    .env("STRIPE", SECRET);
    let server = house.start();
    let forged = Sender::stripe("whsec_of_somebody_else");
    for n in 0..300 {
        assert_eq!(server.ask(forged.event(&format!("evt_{n}"))).status, 401);
    }
    let listed = server.admin_get("/api/v1/sources/stripe/rejections").json();
    let count = listed["items"].as_array().map_or(0, Vec::len);
    assert!((1..=100).contains(&count), "{count}");
    let refused =
        server.metric("hapax_rejections_total", &["source=\"stripe\"", "reason=\"signature\""]);
    assert_eq!(refused, 300.0);
}

#[test]
fn the_history_of_an_event_names_the_secret_that_accepted_it() {
    // The new secret is put before the old one in the config: a position in the list would then mean another secret.
    let config =
        |secrets: &str| format!("[sources.stripe]\nprovider = \"stripe\"\nsecrets = [{secrets}]\n");
    let house =
        House::new(&config("\"env:OLD\"")).env("OLD", SECRET).env("NEW", "whsec_of_the_new_secret");
    let server = house.start();
    server.ask(Sender::stripe(SECRET).event("evt_1")).is("accepted");
    until("the name of the secret is recorded", || {
        let shown = server.admin_get("/api/v1/events/evt_1").json();
        (shown["arrivals"][0]["secret"] == "env:OLD").then_some(())
    });
    server.stop();
    house.configure(&config("\"env:NEW\", \"env:OLD\""));
    let server = house.start();
    server.ask(Sender::stripe("whsec_of_the_new_secret").event("evt_2")).is("accepted");
    until("the name of the new secret is recorded", || {
        let shown = server.admin_get("/api/v1/events/evt_2").json();
        (shown["arrivals"][0]["secret"] == "env:NEW").then_some(())
    });
    let first = server.admin_get("/api/v1/events/evt_1").json();
    assert_eq!(
        (&first["arrivals"][0]["secret"], &first["arrivals"][0]["scheme"]),
        (&"env:OLD".into(), &"stripe".into())
    );
    let page = server.admin_get("/events/evt_1").text();
    assert!(page.contains("verified: stripe, secret env:OLD"), "{page}");
    for text in [first.to_string(), page] {
        assert!(!text.contains(SECRET), "the secret itself is shown");
    }
}
