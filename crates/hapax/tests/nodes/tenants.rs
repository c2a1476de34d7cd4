//! Tenants that are added at run time on one node, as the other nodes see them.

use serde_json::json;

use crate::support::nodes::Database;
use crate::support::{Sender, Server, until};

const KEY: &str = "[vault]\nkey = \"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\n";

fn put(server: &Server, tenant: &str, secret: &str) -> u16 {
    let path = format!("/api/v1/tenants/{tenant}/sources/stripe/secrets");
    let body = json!({"secrets": [{"value": secret}]});
    server.admin_request("PUT", &path, Some(&body)).status
}

fn status(server: &Server, tenant: &str, secret: &str, event: &str) -> u16 {
    let sender = Sender::new("stripe", secret, &format!("/webhooks/{tenant}/stripe"));
    server.ask(sender.event(event)).status
}

#[test]
fn secrets_that_one_node_sets_hold_on_the_other_node() {
    let database = Database::shared("tenants");
    let houses = [0, 1].map(|_| database.house("", KEY));
    let nodes = [houses[0].start(), houses[1].start()];
    let becomes = |secret: &str, expected: u16| {
        let mut n = 0;
        until("the other node knows", || {
            n += 1;
            let event = format!("evt_{secret}_{expected}_{n}");
            (status(&nodes[1], "acme", secret, &event) == expected).then_some(())
        });
    };
    assert_eq!(put(&nodes[0], "acme", "whsec_first"), 200);
    becomes("whsec_first", 200);
    assert_eq!(put(&nodes[0], "acme", "whsec_second"), 200);
    becomes("whsec_second", 200);
    becomes("whsec_first", 401);
    let path = "/api/v1/tenants/acme/sources/stripe/secrets";
    assert_eq!(nodes[0].admin_request("DELETE", path, None).status, 200);
    becomes("whsec_second", 404);
}

#[test]
fn of_tenants_on_two_nodes_that_ask_for_one_secret_at_once_one_gets_it() {
    // Neither node has seen the other's change when it decides.
    let database = Database::shared("tenants_race");
    let houses = [0, 1].map(|_| database.house("", KEY));
    let nodes = [houses[0].start(), houses[1].start()];
    for round in 0..5 {
        let secret = format!("whsec_round_{round}");
        let statuses: Vec<u16> = std::thread::scope(|scope| {
            let asking: Vec<_> = (0..8)
                .map(|n| {
                    let (node, secret) = (&nodes[n % 2], &secret);
                    scope.spawn(move || put(node, &format!("t{round}-{n}"), secret))
                })
                .collect();
            asking.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");
        // A node whose change conflicts again and again may ask the client to retry.
        assert!(statuses.iter().all(|status| [200, 409, 503].contains(status)), "{statuses:?}");
    }
    let recorded = "SELECT count(*) FROM hapax.source_secret_action WHERE what = 'set'";
    assert_eq!(database.number(recorded), 5);
}
