//! Links to the portal on two nodes: a link that one node creates or revokes is valid or void on the other
//! at once.

use serde_json::json;

use crate::portal_visits::{PORTAL, Visit, ask, link, portal};
use crate::support::nodes::Database;

#[test]
fn a_link_of_one_node_opens_the_portal_of_the_other_until_it_is_revoked() {
    let database = Database::shared("portal");
    let key = "[vault]\nkey = \"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\n";
    let houses = [0, 1].map(|_| database.house("", &format!("{key}{PORTAL}")));
    let nodes = [houses[0].start(), houses[1].start()];
    let at = [portal(&nodes[0]), portal(&nodes[1])];
    let door = link(&nodes[0], "acme", &["read"]);
    let visit = Visit::enter(at[1], &door);
    assert_eq!(ask(at[0], "POST", &door, "", "").status, 404, "the code works twice");
    assert_eq!(visit.get("/").status, 200);
    let visit = visit.moved(at[0]);
    assert_eq!(visit.get("/").status, 200);
    // No node may admit the visitor from a cache, not even for a second.
    assert_eq!(nodes[1].admin_request("DELETE", "/api/v1/tenants/acme/portal", None).status, 200);
    assert_eq!(visit.get("/").status, 401);
    assert_eq!(visit.moved(at[1]).get("/").status, 401);
}

#[test]
fn a_list_says_nothing_about_how_many_deliveries_another_tenant_has() {
    // A list reads at most this many rows, and then offers to search further.
    let database = Database::shared("portal_volume");
    let key = "[vault]\nkey = \"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\n";
    let house = database.house("", &format!("{key}{PORTAL}"));
    let node = house.start();
    let endpoint = json!({ "url": "https://shop.example/in", "tenant": "shop" });
    let endpoint = node.admin_post("/api/v1/endpoints", &endpoint).json()["id"].clone();
    let endpoint = endpoint.as_str().unwrap();
    let disabled = node.admin_post(&format!("/api/v1/endpoints/{endpoint}/disable"), &json!({}));
    assert_eq!(disabled.status, 200, "{disabled:?}");
    // In many transactions: in one, each message would read all row versions of those before it.
    database.execute(
        "DO $$ BEGIN FOR n IN 1..202 LOOP \
             PERFORM hapax.publish('invoice.paid', '{}', NULL, 'shop') FROM generate_series(1, 50); \
             COMMIT; \
         END LOOP; END $$",
    );
    let list = format!("/api/v1/deliveries?tenant=acme&endpoint={endpoint}");
    assert!(node.admin_get(&list).json()["next"].is_string(), "the search ends before its bound");
    let visit = Visit::enter(portal(&node), &link(&node, "acme", &["read"]));
    for filter in ["", "&status=held", "&since=1h"] {
        let page = visit.get(&format!("/deliveries?endpoint={endpoint}{filter}"));
        assert_eq!(page.status, 200);
        assert!(!page.text().contains("rel=\"next\""), "{filter}: {}", page.text());
    }
}
