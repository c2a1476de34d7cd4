//! Endpoints that hang, together with endpoints that answer.

use std::sync::{Arc, Condvar, Mutex};

use serde_json::{Value, json};

use crate::support::sink::Sink;
use crate::support::{House, until};

/// Sinks that answer when the test lets them.
#[derive(Default)]
struct Release {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Release {
    fn wait(&self) {
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

#[test]
fn forty_endpoints_are_served_beside_ten_that_hang() {
    // Ten endpoints with 16 attempts each could take all 64 slots for a minute.
    const MESSAGES: usize = 20;
    let house = House::new("[outbound]\nallow = [\"127.0.0.0/8\"]\nmax_in_flight = 64\n");
    let server = house.start();
    let release = Arc::new(Release::default());
    let hanging: Vec<Sink> = (0..10)
        .map(|_| {
            let release = Arc::clone(&release);
            Sink::new(move |_, _| {
                release.wait();
                "200 OK".to_owned()
            })
        })
        .collect();
    let healthy: Vec<Sink> = (0..40).map(|_| Sink::accepting()).collect();
    let add = |sink: &Sink| {
        let body = json!({"url": sink.url(), "timeout": "60s"});
        let answer = server.admin_post("/api/v1/endpoints", &body);
        assert_eq!(answer.status, 201, "{answer:?}");
        answer.json()["id"].as_str().unwrap().to_owned()
    };
    let hung: Vec<String> = hanging.iter().map(add).collect();
    healthy.iter().for_each(|sink| drop(add(sink)));
    for n in 0..MESSAGES {
        let body = json!({"type": "a", "id": format!("m{n}"), "data": {}});
        assert_eq!(server.admin_post("/api/v1/messages", &body).status, 202);
    }
    for sink in &healthy {
        sink.wait_for(MESSAGES);
    }
    // No attempt at a hanging endpoint has ended, so no slot was freed for the healthy endpoints.
    for id in &hung {
        let path = format!("/api/v1/deliveries?endpoint={id}");
        let deliveries: Value = server.admin_get(&path).json();
        for delivery in deliveries["items"].as_array().unwrap() {
            assert_eq!(delivery["attempts"], json!([]), "{delivery}");
        }
    }
    release.open();
    for sink in &hanging {
        sink.wait_for(MESSAGES);
    }
    until("everything is delivered", || {
        let left = server.admin_get("/api/v1/messages?status=delivered").json();
        (left["items"].as_array().unwrap().len() == MESSAGES).then_some(())
    });
}
