//! Links to the portal on two nodes: what one node makes or revokes, the other one knows at once.

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
    // No node may go on for a second with what it remembers.
    assert_eq!(nodes[1].admin_request("DELETE", "/api/v1/tenants/acme/portal", None).status, 200);
    assert_eq!(visit.get("/").status, 401);
    assert_eq!(visit.moved(at[1]).get("/").status, 401);
}
