//! A receiving party at the portal, over HTTP as a browser speaks it.

use std::net::SocketAddr;

use serde_json::json;
use url::form_urlencoded;
use uuid::Uuid;

use crate::support::{Answer, Server, Wire};

/// The config of a portal on a free port.
pub(crate) const PORTAL: &str = "[portal]\nlisten = \"127.0.0.1:0\"\n";

/// The address of a server's portal.
pub(crate) fn portal(server: &Server) -> SocketAddr {
    let line = server.stdout.wait_for("hapax portal http://");
    line.trim().rsplit('/').next().unwrap().parse().unwrap()
}

/// Makes a link for a tenant, and returns the path to enter.
#[track_caller]
pub(crate) fn link(server: &Server, tenant: &str, allow: &[&str]) -> String {
    let path = format!("/api/v1/tenants/{tenant}/portal");
    let made = server.admin_post(&path, &json!({ "ttl": "1h", "allow": allow }));
    assert_eq!(made.status, 201, "{made:?}");
    let url = made.json()["url"].as_str().unwrap().to_owned();
    format!("/enter/{}", url.rsplit('/').next().unwrap())
}

/// A request of a browser to the portal.
pub(crate) fn ask(at: SocketAddr, method: &str, path: &str, cookie: &str, form: &str) -> Answer {
    let mut wire = Wire::connect(at);
    wire.write(format!(
        "{method} {path} HTTP/1.1\r\nhost: {at}\r\naccept: text/html\r\nsec-fetch-site: same-origin\r\n\
         cookie: {cookie}\r\ncontent-type: application/x-www-form-urlencoded\r\n\
         content-length: {}\r\n\r\n{form}",
        form.len()
    ));
    wire.answer()
}

/// A browser that has entered.
pub(crate) struct Visit {
    pub(crate) at: SocketAddr,
    /// The path of the portal's pages.
    pub(crate) base: String,
    cookie: String,
}

impl Visit {
    /// Enters through the path of a link.
    #[track_caller]
    pub(crate) fn enter(at: SocketAddr, door: &str) -> Self {
        let entered = ask(at, "POST", door, "", "");
        assert_eq!(entered.status, 303, "{entered:?}");
        let base = entered.header("location").unwrap().trim_end_matches('/').to_owned();
        let cookie = entered.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
        Self { at, base, cookie }
    }

    /// The same browser at another node, or at this one after a restart.
    pub(crate) fn moved(self, at: SocketAddr) -> Self {
        Self { at, ..self }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        ask(self.at, "GET", &format!("{}{path}", self.base), &self.cookie, "")
    }

    /// Begins to send a form, and waits for an answer instead of sending the rest.
    pub(crate) fn post_slowly(&self, path: &str) -> Answer {
        let mut wire = Wire::connect(self.at);
        wire.write(format!(
            "POST {}{path} HTTP/1.1\r\nhost: {}\r\naccept: text/html\r\nsec-fetch-site: same-origin\r\n\
             cookie: {}\r\ncontent-type: application/x-www-form-urlencoded\r\ncontent-length: 100\r\n\r\nplan=",
            self.base, self.at, self.cookie
        ));
        wire.answer()
    }

    /// Sends a form with an id of its own.
    pub(crate) fn post(&self, path: &str, fields: &[(&str, &str)]) -> Answer {
        let mut form = form_urlencoded::Serializer::new(String::new());
        form.append_pair("plan", &Uuid::now_v7().to_string()).extend_pairs(fields);
        ask(self.at, "POST", &format!("{}{path}", self.base), &self.cookie, &form.finish())
    }
}
