//! Requests through the egress proxy: they use the configured proxy only, and go only to addresses that
//! were judged here.

use std::net::Ipv4Addr;

use hapax_engine::{ENDPOINT_PORTS, EgressProxy, GuardRules, SendErrorClass};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{Canary, NO_CONTENT, Names, Sink, client, post, read_request};

/// A proxy that answers each CONNECT with `answer`, and then each request with `NO_CONTENT`.
struct Proxy {
    port: u16,
    requests: mpsc::UnboundedReceiver<String>,
    _serving: JoinSet<()>,
}

impl Proxy {
    async fn answering(answer: &'static str) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (heard, requests) = mpsc::unbounded_channel();
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                for answer in [answer, NO_CONTENT] {
                    let Some(request) = read_request(&mut stream).await else { break };
                    let _ = heard.send(request);
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            }
        });
        Self { port, requests, _serving: serving }
    }

    fn rules(&self) -> GuardRules {
        let proxy = EgressProxy::parse(&format!("http://127.0.0.1:{}", self.port)).unwrap();
        GuardRules::new(Vec::new(), ENDPOINT_PORTS.to_vec(), Some(proxy))
    }

    fn requests(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.requests.try_recv().ok()).collect()
    }
}

/// A proxy that resolved the name itself could connect to an internal address, so Hapax sends it an
/// address.
#[tokio::test]
async fn a_proxy_is_asked_for_the_judged_address_and_the_host_stays_the_name() {
    let mut proxy = Proxy::answering("HTTP/1.1 200 Connection established\r\n\r\n").await;
    let names = Names::one("hook.example", &["8.8.8.8"]);
    let client = client(proxy.rules(), &names);
    assert_eq!(post(&client, "http://hook.example/in").await.unwrap().status, 204);
    let requests = proxy.requests();
    assert!(requests[0].starts_with("CONNECT 8.8.8.8:80 HTTP/1.1\r\n"), "{}", requests[0]);
    assert!(!requests[0].contains("hook.example"), "{}", requests[0]);
    assert!(requests[1].starts_with("POST /in HTTP/1.1\r\n"), "{}", requests[1]);
    assert!(requests[1].contains("\r\nhost: hook.example\r\n"), "{}", requests[1]);
}

/// The same rules hold through the proxy: it may reach more internal addresses than Hapax does.
#[tokio::test]
async fn a_proxy_is_not_asked_for_a_blocked_address() {
    let canary = Canary::new().await;
    let egress = EgressProxy::parse(&format!("http://127.0.0.1:{}", canary.port())).unwrap();
    let names = Names::one("inside.example", &["10.0.0.1"]);
    names.set("mixed.example", &[&["8.8.8.8", "10.0.0.1"]]);
    let client = client(GuardRules::new(Vec::new(), ENDPOINT_PORTS.to_vec(), Some(egress)), &names);
    for host in ["inside.example", "mixed.example", "10.0.0.1", "[::1]", "localhost"] {
        let error = post(&client, &format!("http://{host}/")).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Blocked, "{host}: {error}");
    }
    canary.saw_nothing().await;
}

/// A refusal of the proxy is a failed attempt whose text names the proxy.
#[tokio::test]
async fn a_refusal_of_the_proxy_is_a_failure_to_connect() {
    for answer in [
        "HTTP/1.1 403 Forbidden\r\n\r\n",
        "HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n\r\n",
    ] {
        let mut proxy = Proxy::answering(answer).await;
        let client = client(proxy.rules(), &Names::one("hook.example", &["8.8.8.8"]));
        let error = post(&client, "http://hook.example/").await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Connect, "{error}");
        assert!(error.text.contains("egress proxy") && !error.may_have_arrived, "{error}");
        assert_eq!(proxy.requests().len(), 1);
    }
}

/// Runs in a process of its own whose environment names a proxy: that proxy must see nothing.
#[tokio::test]
async fn a_proxy_in_the_environment_is_ignored() {
    const CHILD: &str = "HAPAX_TEST_SINK";
    if let Ok(url) = std::env::var(CHILD) {
        let client = client(super::loopback_allowed(), &Names::new());
        assert_eq!(post(&client, &url).await.unwrap().status, 204);
        return;
    }
    let canary = Canary::new().await;
    let mut sink = Sink::answering(NO_CONTENT).await;
    let proxy = format!("http://127.0.0.1:{}", canary.port());
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "outbound::egress_proxy::a_proxy_in_the_environment_is_ignored"]);
    child.env(CHILD, sink.url()).kill_on_drop(true);
    for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]
    {
        child.env(name, &proxy);
    }
    let output = crate::support::within(child.output()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(sink.requests().len(), 1);
    canary.saw_nothing().await;
}
