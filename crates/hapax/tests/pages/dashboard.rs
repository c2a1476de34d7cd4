//! An operator's way through the pages in chromium, from the login to an event that appears by itself, and
//! through filters, timeline, review and replay. Parts of the way use hostile text, the keyboard only, no
//! script, a narrow screen or dark colours. Each store has one browser for all parts.
//!
//! After every part the console must be empty, and no request may have gone to another host.

use super::browser::{Browser, ENTER};
use crate::support::ledger::Ledger;
use crate::support::nodes::Database;
use crate::support::sender::{event, now};
use crate::support::sink::Sink;
use crate::support::{Answer, House, Sender, Server, Wire, until};
use serde_json::{Value, json};

const SECRET: &str = "whsec_pages";
const OPS: &str = "token-of-the-operators";
const READER: &str = "token-of-the-readers";
const ROOT: &str = "token-of-the-admins";

/// How many dead letters there are before the table exists.
const DEAD: usize = 20;

/// The table of the handler. Until it exists, every job becomes a dead letter.
const TABLE: &str = "CREATE TABLE fees (event_id text)";

/// A server that needs a token, with one handler that has one attempt.
fn config() -> String {
    format!(
        "admin_open = false\n\
         [tokens.ops]\nvalue = \"{OPS}\"\nallow = [\"operate\"]\n\
         [tokens.reader]\nvalue = \"{READER}\"\nallow = [\"read\"]\n\
         [tokens.root]\nvalue = \"{ROOT}\"\nallow = [\"admin\"]\n\
         [vault]\nkey = \"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\n\
         [outbound]\nallow = [\"127.0.0.0/8\"]\n\
         [sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"{SECRET}\"]\nlate = \"review\"\n\
         [sources.stripe.handlers.fee]\nretry = [\"0s\"]\ntypes = [\"payout.*\"]\n\
         timeout = \"10s\"\nsql = \"INSERT INTO fees VALUES (:event_id)\"\n"
    )
}

#[test]
fn the_dashboard_in_a_browser_on_sqlite() {
    let house = House::new(&config());
    let server = house.start();
    walk(
        "the_dashboard_in_a_browser_on_sqlite",
        server,
        || {
            Ledger::at(&house.database()).execute(TABLE);
        },
        Looks::Everywhere,
    );
}

#[test]
fn the_dashboard_in_a_browser_on_postgres() {
    let database = Database::empty("pages");
    let house = House::new(&format!("database_url = \"{}\"\n{}", database.url, config()));
    let server = house.start();
    walk(
        "the_dashboard_in_a_browser_on_postgres",
        server,
        || {
            database.execute(TABLE);
        },
        Looks::OnTheWay,
    );
}

#[test]
fn the_dashboard_in_a_browser_over_tls() {
    // HTTP/2 has no Host header, and the cookie is only for TLS.
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tls-for-tests");
    let tls = format!("admin_tls = {{ cert = \"{data}.pem\", key = \"{data}.key\" }}\n");
    let server = House::new(&(tls + &config())).start();
    let base = format!("https://{}", server.admin);
    let Some(browser) = Browser::start("the_dashboard_in_a_browser_over_tls", &base) else {
        return;
    };
    server.stdout.wait_for(&format!("admin {base}"));
    let operator = Operator { server, browser, sender: Sender::stripe(SECRET) };
    operator.browser.open("/handlers");
    operator.log_in(OPS, "anna");
    assert_eq!(operator.browser.path(), "/handlers");
    operator.browser.follow("Pause…");
    operator.browser.follow("Pause");
    operator.browser.shows(&["The handler stripe/fee is paused.", "ops (anna)"]);
    operator.browser.follow("Log out");
    assert_eq!(operator.browser.path(), "/login");
    operator.browser.is_quiet();
}

fn walk(test: &str, server: Server, mend: impl FnOnce(), looks: Looks) {
    let base = format!("http://{}", server.admin);
    let Some(browser) = Browser::start(test, &base) else { return };
    let operator = Operator { server, browser, sender: Sender::stripe(SECRET) };
    let part = |act: &dyn Fn(&Operator)| {
        act(&operator);
        operator.browser.is_quiet();
    };
    part(&Operator::logs_in);
    part(&Operator::sees_the_first_event_come);
    part(&Operator::filters_and_pages);
    part(&Operator::reads_hostile_text);
    mend();
    part(&Operator::replays_by_keyboard);
    part(&Operator::replays_all_that_match);
    part(&Operator::decides_in_review);
    part(&Operator::works_without_script);
    part(&Operator::sends);
    part(&Operator::silences_and_tests_alerts);
    match looks {
        Looks::Everywhere => part(&Operator::looks_at_every_page),
        Looks::OnTheWay => {}
    }
    part(&Operator::may_only_read);
    part(&Operator::administers);
    operator.sees_that_the_server_has_gone();
}

/// The pages whose appearance the test checks. Pages look the same with every store, so one test checks all of them.
enum Looks {
    Everywhere,
    OnTheWay,
}

/// An operator at the browser.
struct Operator {
    server: Server,
    browser: Browser,
    sender: Sender,
}

impl Operator {
    /// A wrong token is refused, the right one leads to the page that was asked for.
    fn logs_in(&self) {
        let browser = &self.browser;
        browser.open("/events?type=payout.paid");
        assert_eq!(browser.path(), "/login?next=%2Fevents%3Ftype%3Dpayout.paid");
        browser.is_sound();
        browser.expect("401");
        self.log_in("wrong-token-of-somebody", "");
        browser.shows(&["This token is not valid on this server."]);
        self.log_in(OPS, "anna");
        assert_eq!(browser.path(), "/events?type=payout.paid");
        browser.shows(&["No event matches", "ops (anna)"]);
        let cookie = browser.script("return document.cookie");
        assert_eq!(cookie, "", "a script can read the session");
    }

    /// The empty overview shows the first event without being loaded again. The page of the event
    /// shows each copy in the same way.
    fn sees_the_first_event_come(&self) {
        let browser = &self.browser;
        browser.open("/");
        browser.shows(&["No event has arrived"]);
        browser.is_sound();
        browser.script("window.sameDocument = true");
        self.post(&event("evt_first"));
        browser.comes_to_show("1 dead letter");
        assert_eq!(browser.script("return window.sameDocument"), true, "the page was loaded again");

        self.reaches("evt_first", "dead");
        for n in 0..DEAD - 1 {
            self.post(&event(&format!("evt_plan_{n}")));
        }
        for n in 0..DEAD - 1 {
            self.reaches(&format!("evt_plan_{n}"), "dead");
        }
        // The bar under the pointer has the figures of its row in the table.
        browser.open("/");
        browser.comes_to_show("in one step");
        let shown = browser.script(
            "const svg = document.querySelector('.plot svg');
            const { right, top } = svg.getBoundingClientRect();
            const at = { bubbles: true, clientX: right - 1, clientY: top + 1 };
            svg.dispatchEvent(new PointerEvent('pointermove', at));
            return svg.querySelector('title').textContent",
        );
        let shown = shown.as_str().unwrap();
        assert!(shown.contains("New: ") && shown.contains("Waiting: "), "{shown}");

        browser.open("/dead");
        browser.shows(&[&format!("{DEAD} dead letters, 1 error"), "fees", "evt_first"]);
        browser.follow("evt_first");
        browser.shows(&["dead", "What happened", "fee"]);
        browser.script("window.sameDocument = true");
        self.post(&event("evt_first"));
        browser.comes_to_show("×2");
        assert_eq!(browser.script("return window.sameDocument"), true, "the page was loaded again");
        let times = browser.script(
            "return [...document.querySelectorAll('.timeline time')].map((t) => t.dateTime)",
        );
        let times = times.as_array().unwrap();
        assert!(times.len() >= 3 && times.is_sorted_by_key(|at| at.as_str().unwrap()), "{times:?}");
    }

    /// The filter is part of the URL, and the pages of a list neither repeat nor skip an event.
    fn filters_and_pages(&self) {
        let browser = &self.browser;
        for n in 0..5 {
            self.post(&event(&format!("evt_page_{n}")).replace("payout.paid", "customer.created"));
        }
        browser.open("/events");
        browser.fill("main [name=type]", "customer.created");
        browser.fill("main [name=status]", "ignored");
        browser.follow("Filter");
        let path = browser.path();
        assert!(
            path.contains("type=customer.created") && path.contains("status=ignored"),
            "{path}"
        );
        browser.shows(&["evt_page_0", "evt_page_4"]);
        browser.hides(&["evt_first"]);

        browser.open("/events?type=customer.created&limit=2");
        let mut seen = Vec::new();
        loop {
            let ids = "return [...document.querySelectorAll('tbody bdi')].map((e) => e.innerText)
                .filter((text) => text.startsWith('evt_page_'))";
            let ids = browser.script(ids);
            seen.extend(ids.as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()));
            let older = browser.script("return document.querySelector('[rel=next]') !== null");
            match older == true {
                true => browser.follow("Older"),
                false => break,
            }
        }
        let newest_first: Vec<_> = (0..5).rev().map(|n| format!("evt_page_{n}")).collect();
        assert_eq!(seen, newest_first);
        browser.open("/");
        browser.fill(".find input", "evt_page_3");
        browser.to_next_page(|| browser.press(ENTER));
        browser.shows(&["evt_page_3", "What happened"]);
    }

    /// Every field that a sender controls is shown as text, and invisible characters are shown by
    /// name.
    fn reads_hostile_text(&self) {
        let browser = &self.browser;
        let attacks = [
            "<script>window.hit = 1</script>",
            "\"><img src=x onerror=window.hit=1>",
            "</title><svg onload=window.hit=1>",
            "'};window.hit=1;//",
            "javascript:window.hit=1",
            "{{ 7*7 }}{% raw %}",
            "evt_\u{202e}gpj.exe\u{2066}\u{200b}",
            "evt_\u{1b}[31m\u{7}\r\nSet-Cookie: a=b",
        ];
        let deep = format!("{}1{}", "[".repeat(60), "]".repeat(60));
        for (n, attack) in attacks.iter().enumerate() {
            // An id with control characters is refused on arrival.
            let name: String = attack.chars().filter(|c| !c.is_control()).collect();
            let id = format!("{n}{name}");
            let object = json!({ (*attack): attack });
            let body = format!(
                r#"{{"id":{},"type":{},"data":{{"object":{object}}},"deep":{deep},"lone":"\ud800"}}"#,
                json!(id),
                json!(name)
            );
            let request = self.sender.request(&body).with("x-note", "<img src=y onerror=hit()>");
            assert_eq!(self.server.ask(request.bytes()).decision(), "accepted", "{body}");
        }
        let long = format!("evt_{}", "w".repeat(251));
        self.post(&event(&long));
        browser.looks(360, "light");
        browser.open("/events?limit=50");
        browser.is_sound();
        browser.shows(&["<script>window.hit = 1</script>", "\\u{202e}", &long]);
        let events = self.api("/api/v1/events?limit=9").json();
        for event in events["items"].as_array().unwrap() {
            let id = event["id"].as_str().unwrap();
            for tab in ["pretty", "raw", "headers", "signature", "curl"] {
                browser.open(&format!("/events/{id}?tab={tab}"));
                browser.is_sound();
                let shown = browser.text();
                let hidden = ['\u{202e}', '\u{2066}', '\u{200b}', '\u{1b}', '\u{7}'];
                assert!(!shown.contains(hidden), "{shown:?}");
                let has_body = matches!(tab, "pretty" | "raw" | "curl");
                let is_lone = has_body && event["event_id"] != long.as_str();
                assert_eq!(shown.contains("\\ud800"), is_lone, "{tab}: {shown}");
            }
            browser.open(&format!("/events/{id}/replay"));
            browser.is_sound();
        }
        assert_eq!(browser.script("return window.hit ?? null"), Value::Null, "a script ran");
        browser.looks(1200, "light");
    }

    /// The operator goes from the list to the replay with its dry run without a mouse.
    fn replays_by_keyboard(&self) {
        let browser = &self.browser;
        browser.open("/events?type=payout.paid&q=evt_first");
        browser.tab_to("evt_first");
        browser.to_next_page(|| browser.press(ENTER));
        browser.tab_to("Replay…");
        browser.to_next_page(|| browser.press(ENTER));
        browser.shows(&["Replay this event?", "fee would run."]);
        browser.tab_to("Replay");
        browser.to_next_page(|| browser.press(ENTER));
        browser.shows(&["fee runs now."]);
        browser.comes_to_show("processed");
        browser.follow("Replay…");
        browser.shows(&["fee is done already"]);
        browser.follow("Replay");
        browser.shows(&["nothing happens unless it is forced"]);
        let event = self.api("/api/v1/events/evt_first").json();
        assert_eq!(event["jobs"][0]["run"], 1, "{event}");
        browser.open("/audit");
        browser.shows(&["ops (anna)", "POST /events/{id}/replay"]);
    }

    /// A plan is counted first, runs at its rate, shows its progress and can be cancelled.
    fn replays_all_that_match(&self) {
        let browser = &self.browser;
        browser.open("/dead");
        browser.fill("main [name=handler]", "fee");
        browser.follow("Filter");
        browser.follow("Replay all that match…");
        browser.shows(&[&format!("Replay {DEAD} events?"), "status dead", "handler fee"]);
        browser.is_sound();
        browser.fill("[name=rate]", "1");
        browser.fill("[name=reason]", "the table is there");
        browser.follow("Replay");
        browser.shows(&["The plan is recorded and runs.", "1 a second at most", "running"]);
        browser.is_sound();
        browser.follow("Cancel…");
        browser.follow("Cancel the plan");
        browser.shows(&["The plan is cancelled now."]);

        let left = self.api("/api/v1/events?status=dead&limit=500").json();
        let left = left["items"].as_array().unwrap().len();
        // A plan that is cancelled at once may not have taken any event yet.
        assert!((1..=DEAD).contains(&left), "{left} of {DEAD} are left");
        // One dead letter is left for the pages without script.
        browser.open("/events?status=dead&q=evt_plan");
        browser.follow("Replay all that match…");
        browser.follow("Replay");
        browser.comes_to_show("needed nothing");
        browser.comes_to_show("done");
        browser.open("/events?status=dead&q=evt_plan");
        browser.hides(&["Replay all that match…"]);
    }

    /// A late event waits, and runs once it is approved; a rejection needs a reason.
    fn decides_in_review(&self) {
        let browser = &self.browser;
        for id in ["evt_late", "evt_odd"] {
            let late = self.sender.request_at(event(id), now() - 3_600);
            assert_eq!(self.server.ask(late.bytes()).decision(), "review");
        }
        browser.open("/review");
        browser.shows(&["evt_late", "evt_odd"]);
        browser.follow("evt_late");
        browser.follow("Approve…");
        browser.follow("Approve");
        browser.comes_to_show("processed");
        browser.open("/review");
        browser.hides(&["evt_late"]);
        browser.follow("evt_odd");
        browser.follow("Reject…");
        let is_required = browser.script("return document.querySelector('[name=reason]').required");
        assert_eq!(is_required, true);
        browser.fill("[name=reason]", "nobody sent it");
        browser.follow("Reject");
        browser.shows(&["The event is discarded now.", "nobody sent it"]);
    }

    /// Pages and forms also work when the browser runs no script.
    fn works_without_script(&self) {
        let browser = &self.browser;
        browser.allow_scripts(false);
        browser.open("/events?status=dead");
        browser.fill("main [name=type]", "payout.paid");
        browser.follow("Filter");
        let dead = self.api("/api/v1/events?status=dead&type=payout.paid").json();
        let id = dead["items"][0]["event_id"].as_str().unwrap();
        browser.follow(id);
        browser.follow("Replay…");
        browser.follow("Replay");
        browser.shows(&["fee runs now."]);
        self.reaches(id, "processed");
        // A rendering is shared for a second, and without script the page does not update itself.
        let path = browser.path();
        until("the page shows it", || {
            browser.open(&path);
            browser.text().contains("processed").then_some(())
        });
        let marks = browser.script("return document.querySelectorAll('[data-copy-ready]').length");
        assert_eq!(marks, 0, "the script ran");
        browser.allow_scripts(true);
    }

    /// The address, the description and the answer of an endpoint contain markup.
    fn sends(&self) {
        let browser = &self.browser;
        let sink = Sink::new(|_, _| "500 X".to_owned());
        let endpoint = json!({
            "url": format!("{}?<script>window.hit=1</script>", sink.url()),
            "types": ["fee.*"],
            "retry": ["0s"],
            "description": "<img src=x onerror=window.hit=1>",
        });
        let added = self.api_post("/api/v1/endpoints", &endpoint);
        assert_eq!(added.status, 201, "{added:?}");
        let id = added.json()["id"].as_str().unwrap().to_owned();
        let message = json!({ "type": "fee.charged", "id": "msg_1", "data": { "a": "</pre><b>" } });
        assert_eq!(self.api_post("/api/v1/messages", &message).status, 202);
        browser.open(&format!("/endpoints/{id}"));
        browser.comes_to_show("dead");
        browser.is_sound();
        browser.follow("Send many again…");
        browser.shows(&["Send 1 delivery again?"]);
        browser.fill("main [name=status]", "missing");
        browser.follow("Count");
        browser.shows(&["No delivery matches"]);
        browser.follow("Back");
        browser.follow("Send many again…");
        browser.follow("Send again");
        browser.comes_to_show("1 changed");
        sink.wait_for(2);
        browser.open(&format!("/endpoints/{id}"));
        browser.follow("Disable…");
        browser.follow("Disable");
        browser.shows(&["The endpoint is disabled.", "disabled"]);
        browser.open("/messages");
        browser.follow("msg_1");
        browser.is_sound();
        assert_eq!(browser.script("return window.hit ?? null"), Value::Null, "a script ran");
    }

    /// An alert is silenced with a reason, and the silence is ended, with and without JavaScript. A test alert reaches
    /// the endpoint that was added for it.
    fn silences_and_tests_alerts(&self) {
        let browser = &self.browser;
        let late = self.sender.request_at(event("evt_alert"), now() - 3_600);
        assert_eq!(self.server.ask(late.bytes()).decision(), "review");
        until("an alert", || {
            let alerts = self.api("/api/v1/alerts").json();
            let is_there = |alert: &Value| alert["name"] == "review";
            alerts["items"].as_array()?.iter().any(is_there).then_some(())
        });
        browser.open("/");
        browser.shows(&["No endpoint receives alerts: no endpoint of the tenant hapax"]);
        for (with_script, reason) in [(true, "anna <b>looks</b>"), (false, "still looking")] {
            browser.allow_scripts(with_script);
            browser.open("/alerts");
            browser.shows(&["1 event waits for review"]);
            browser.is_sound();
            browser.follow("Silence…");
            browser.shows(&["Silence this alert?"]);
            browser.fill("[name=for]", "2h");
            browser.fill("[name=reason]", reason);
            browser.follow("Silence");
            browser.shows(&["The alert is silenced until", reason, "ops (anna)"]);
            browser.follow("End the silence…");
            browser.follow("End the silence");
            browser.shows(&["The alert is no longer silenced."]);
            browser.hides(&[reason]);
        }
        browser.open("/alerts/test");
        browser.shows(&["No endpoint receives alerts"]);
        let sink = Sink::accepting();
        let endpoint = json!({ "url": sink.url(), "tenant": "hapax", "types": ["hapax.alert.*"] });
        assert_eq!(self.api_post("/api/v1/endpoints", &endpoint).status, 201);
        for with_script in [false, true] {
            browser.allow_scripts(with_script);
            browser.open("/alerts");
            browser.shows(&["Alerts are sent to 1 endpoint"]);
            browser.follow("Send a test alert…");
            browser.follow("Send");
            browser.shows(&["The test alert is on its way, in 2 messages."]);
        }
        sink.wait_until("two tests", |got| {
            got.iter().filter(|one| one.text().contains("\"name\":\"test\"")).count() == 4
        });
        browser.open("/");
        browser.hides(&["No endpoint receives alerts"]);
    }

    /// Opens every list and one page of each kind, narrow and dark, wide and light.
    fn looks_at_every_page(&self) {
        let browser = &self.browser;
        browser.open("/");
        let lists = browser.script(
            "return [...document.querySelectorAll('nav a')].map((a) => a.getAttribute('href'))",
        );
        let mut pages: Vec<String> = lists
            .as_array()
            .unwrap()
            .iter()
            .map(|path| path.as_str().unwrap().to_owned())
            .collect();
        assert!(pages.len() > 8, "{pages:?}");
        let first = |list: &str, field: &str| {
            let items = self.api(list).json();
            items["items"][0][field].as_str().unwrap().to_owned()
        };
        pages.push("/".to_owned());
        pages.push("/sources/stripe".to_owned());
        pages.push("/jobs?source=stripe&handler=fee".to_owned());
        pages.push(format!("/events/{}", first("/api/v1/events?q=evt_first", "id")));
        pages.push(format!("/deliveries/{}", first("/api/v1/deliveries", "id")));
        pages.push(format!("/endpoints/{}", first("/api/v1/endpoints", "id")));
        pages.push("/messages/msg_1".to_owned());
        pages.push(format!("/replays/{}", first("/api/v1/replays", "id")));
        for (width, scheme) in [(360, "dark"), (1200, "light")] {
            browser.looks(width, scheme);
            for page in &pages {
                browser.open(page);
                browser.is_sound();
                if std::env::var_os("HAPAX_TEST_SCREENSHOTS").is_some() {
                    let name = page.split('/').nth(1).unwrap();
                    browser.screenshot(&format!("{width}-{scheme}-{name}-{}", page.len()));
                }
            }
        }
    }

    /// A reader sees everything and is offered no action; if it sends one anyway, the server
    /// refuses it.
    fn may_only_read(&self) {
        let browser = &self.browser;
        browser.open("/events?q=evt_first");
        browser.follow("Log out");
        assert_eq!(browser.path(), "/login");
        browser.open("/events");
        assert!(browser.path().starts_with("/login"), "{}", browser.path());
        self.log_in(READER, "");
        browser.open("/events?q=evt_first");
        browser.follow("evt_first");
        browser.shows(&["What happened"]);
        browser.hides(&["Replay…"]);
        let replay = format!("{}/replay", browser.path());
        browser.expect("403");
        browser.open(&replay);
        browser.shows(&["403", "this token does not permit operating"]);
        browser.open("/audit?who=reader");
        browser.shows(&["POST /login"]);
        browser.hides(&["replay"]);
    }

    /// An administrator sees a new secret once, and deletes an Idempotency-Key with a reason.
    fn administers(&self) {
        let browser = &self.browser;
        browser.follow("Log out");
        self.log_in(ROOT, "");
        let endpoints = self.api("/api/v1/endpoints").json();
        browser.open(&format!("/endpoints/{}", endpoints["items"][0]["id"].as_str().unwrap()));
        browser.follow("Rotate the secret…");
        browser.fill("[name=overlap]", "1h");
        browser.follow("Rotate");
        browser.shows(&["New secret", "whsec_"]);
        browser.is_sound();
        browser.follow("Back to the endpoint");
        browser.hides(&["whsec_"]);
        browser.shows(&["the newest since", "a replaced one since", "until"]);

        // The forms of the dashboard are stored as Idempotency-Keys too, and are listed only if the scope names them.
        browser.open("/keys");
        browser.hides(&["hapax:dashboard"]);
        browser.open("/keys?scope=hapax%3Adashboard%2Fops&limit=1");
        browser.shows(&["finished", "303"]);
        let shown = browser.script("return document.querySelector('tbody bdi').innerText");
        browser.follow("Delete…");
        browser.fill("[name=reason]", "sent by mistake");
        browser.follow("Delete");
        browser.shows(&["The key is deleted."]);
        browser.hides(&[shown.as_str().unwrap()]);
        browser.open("/audit");
        browser.shows(&["deleted an Idempotency-Key: sent by mistake"]);
    }

    /// A page that is open when the server is killed says that its figures are old, and stays where it is.
    fn sees_that_the_server_has_gone(self) {
        let Self { server, browser, .. } = self;
        browser.open("/");
        browser.hides(&["This page is not updated any more"]);
        server.kill();
        browser.comes_to_show("This page is not updated any more");
        browser.shows(&["Sources, last 1h"]);
    }

    fn log_in(&self, token: &str, name: &str) {
        self.browser.fill("[name=token]", token);
        self.browser.fill("[name=name]", name);
        self.browser.follow("Log in");
    }

    /// Sends an event with this body.
    fn post(&self, body: &str) -> Answer {
        let answer = self.server.ask(self.sender.request(body).bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        answer
    }

    /// Waits until an event has this status.
    fn reaches(&self, id: &str, status: &str) {
        until(&format!("{id} is {status}"), || {
            let event = self.api(&format!("/api/v1/events/{id}")).json();
            (event["status"] == status).then_some(())
        });
    }

    fn api(&self, path: &str) -> Answer {
        let host = self.server.admin;
        let headers = format!("host: {host}\r\nauthorization: Bearer {ROOT}\r\n");
        self.server.admin_get_with(path, &headers)
    }

    fn api_post(&self, path: &str, body: &Value) -> Answer {
        let (host, body) = (self.server.admin, body.to_string());
        let mut wire = Wire::connect(host);
        wire.write(format!(
            "POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {ROOT}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ));
        wire.answer()
    }
}
