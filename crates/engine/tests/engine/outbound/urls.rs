//! The URLs and custom headers of endpoints, in every odd form.

use hapax_engine::{
    CustomHeaders, EgressProxy, EndpointUrl, GuardRules, HeaderProblem, UrlProblem,
};
use http::HeaderMap;

use super::loopback_allowed;

#[track_caller]
fn canonical(text: &str, expected: &str) {
    let url = EndpointUrl::parse(text, &GuardRules::default());
    assert_eq!(url.as_ref().map(EndpointUrl::as_str), Ok(expected), "{text:?}");
    // The stored text is read back as the same URL.
    assert_eq!(EndpointUrl::from_stored(expected).as_ref().map(EndpointUrl::as_str), Ok(expected));
}

#[track_caller]
fn refused(text: &str) -> UrlProblem {
    let url = EndpointUrl::parse(text, &GuardRules::default());
    url.expect_err(&format!("{text:?} was accepted"))
}

/// Tries to get one host stored under several spellings, or a path changed on its way.
#[test]
fn a_url_is_stored_in_its_canonical_form() {
    canonical("https://example.com", "https://example.com/");
    canonical("HTTPS://EXAMPLE.COM:443/Hook", "https://example.com/Hook");
    canonical("http://example.com:80/", "http://example.com/");
    canonical("https://example.com./hook", "https://example.com/hook");
    canonical("https://b\u{fc}cher.example/", "https://xn--bcher-kva.example/");
    canonical("https://ex\u{2460}mple.com/", "https://ex1mple.com/");
    canonical("https://example%2ecom/", "https://example.com/");
    canonical("https://8.8.8.8/", "https://8.8.8.8/");
    canonical("https://0x8.8.2056/", "https://8.8.8.8/");
    canonical("https://[2606:4700:0:0::1111]/", "https://[2606:4700::1111]/");
    canonical("https://a_b.example.com/", "https://a_b.example.com/");
    canonical(
        "https://example.com/a/../b/%41%2f?x=%20&y=a+b|",
        "https://example.com/b/%41%2f?x=%20&y=a+b|",
    );
    canonical("https://example.com/\u{e9}?\u{e9}", "https://example.com/%C3%A9?%C3%A9");
    canonical("https://example.com/?", "https://example.com/?");
}

/// Tries every spelling of loopback and of other addresses that a text filter would miss.
#[test]
fn every_spelling_of_a_blocked_address_is_refused_when_the_endpoint_is_made() {
    for host in [
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "0",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "0x7f000001",
        "0x7f.1",
        "127.0.0.1.",
        "localhost",
        "LOCALHOST.",
        "a.localhost",
        "127%2e0%2e0%2e1",
        "127.0.0.\u{2460}",
        "\u{ff11}27.0.0.1",
        "127\u{3002}0\u{3002}0\u{3002}1",
        "169.254.169.254",
        "2852039166",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:a9fe:a9fe]",
        "[::127.0.0.1]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "168.63.129.16",
    ] {
        for text in [format!("https://{host}/"), format!("http://{host}:80/in?x=1")] {
            let problem = refused(&text);
            assert!(matches!(problem, UrlProblem::Blocked { .. }), "{text}: {problem}");
        }
    }
}

/// Tries forms that parsers read differently, and those that hide the host from a reader.
#[test]
fn a_url_that_can_be_read_in_two_ways_is_refused_with_its_reason() {
    use UrlProblem as P;
    for (text, problem) in [
        ("https://user:pass@example.com/", P::User),
        ("https://good.example@127.0.0.1/", P::User),
        ("https://@example.com/", P::User),
        ("https://:@example.com/", P::User),
        ("https://example.com/#@evil.example", P::Fragment),
        ("https://example.com#@evil.example/", P::Fragment),
        ("https://example.com\\@evil.example/", P::Character),
        ("https:\\\\example.com/", P::Character),
        ("https://exam\tple.com/", P::Character),
        ("https://example.com/\r\nHost: evil", P::Character),
        ("https://example.com/\n", P::Character),
        (" https://example.com/", P::Character),
        ("https://example.com/\u{a0}", P::Character),
        ("https://example.com/\0", P::Character),
        ("https:example.com", P::Scheme),
        ("https:/example.com", P::Scheme),
        ("//example.com/", P::Scheme),
        ("example.com", P::Scheme),
        ("", P::Scheme),
        ("https:///example.com", P::NoHost),
        ("https://", P::NoHost),
        ("https://?x", P::NoHost),
        ("https://example.com:0/", P::Port),
    ] {
        assert_eq!(refused(text), problem, "{text:?}");
    }
    for scheme in
        ["file", "gopher", "ftp", "unix", "data", "ws", "javascript", "httpx", "h\u{131}ttp"]
    {
        assert_eq!(refused(&format!("{scheme}://example.com/")), P::Scheme, "{scheme}");
    }
    for text in [
        "https://example.com:65536/",
        "https://example.com:-1/",
        "https://example.com:80:80/",
        "https://example.com:4%343/",
        "https://[127.0.0.1]/",
        "https://::1/",
        "https://2606:4700::1111/",
        "https://[fe80::1%25eth0]/",
        "https://[::1",
        "https://.",
        "https://example..com/",
        "https://.example.com/",
        "https://example.com../",
        "https://exa%00mple.com/",
        "https://exa%2fmple.com/",
        "https://1.2.3.4.5/",
        "https://256.256.256.256/",
        "https://0x100000000/",
        "https://xn--/",
        "https://exa$mple.com/",
        "https://exa*mple.com/",
    ] {
        let problem = refused(text);
        assert!(matches!(problem, P::Invalid(_)), "{text:?}: {problem:?}");
    }
    let label = "a".repeat(64);
    assert!(matches!(refused(&format!("https://{label}.example/")), P::Invalid(_)));
    assert_eq!(refused(&format!("https://example.com/{}", "a".repeat(3_000))), P::TooLong);
    // Percent-encoding makes the URL longer than the given text.
    assert_eq!(refused(&format!("https://example.com/{}", "\u{e9}".repeat(800))), P::TooLong);
}

/// Tries ports of databases and mail servers, which answer an HTTP request in their own protocol.
#[test]
fn a_port_is_refused_unless_it_is_configured_or_nets_are_allowed() {
    for port in [1, 22, 25, 5432, 6379, 8443, 65535] {
        for host in ["example.com", "8.8.8.8", "[2606:4700::1111]"] {
            let text = format!("https://{host}:{port}/");
            assert!(matches!(refused(&text), UrlProblem::Blocked { .. }), "{text}");
        }
    }
    let rules = GuardRules::new(Vec::new(), vec![8443], None);
    assert!(EndpointUrl::parse("https://example.com:8443/", &rules).is_ok());
    assert!(EndpointUrl::parse("https://example.com/", &rules).is_err());
    // The name may resolve into an allowed net; its address decides at the connection.
    assert!(EndpointUrl::parse("http://app.example:9000/", &loopback_allowed()).is_ok());
    assert!(EndpointUrl::parse("http://127.0.0.1:9000/", &loopback_allowed()).is_ok());
    assert!(EndpointUrl::parse("http://[::ffff:127.0.0.1]:9000/", &loopback_allowed()).is_ok());
    assert!(EndpointUrl::parse("http://localhost:9000/", &loopback_allowed()).is_ok());
    assert!(EndpointUrl::parse("http://8.8.8.8:9000/", &loopback_allowed()).is_err());
    assert!(EndpointUrl::parse("http://10.0.0.1/", &loopback_allowed()).is_err());
    // The operator's exceptions do not apply to a receiving party's own endpoints.
    assert!(EndpointUrl::parse("http://127.0.0.1/", &loopback_allowed().strictest()).is_err());
}

/// A path can be a password (a capability URL), so it must not reach a log by `{:?}`.
#[test]
fn the_path_of_a_url_is_not_printed_for_debugging() {
    let url = EndpointUrl::from_stored("https://example.com/hooks/s3cret?token=s3cret").unwrap();
    assert!(!format!("{url:?}").contains("s3cret"), "{url:?}");
}

#[track_caller]
fn header(name: &str, value: &str, expected: Result<(), HeaderProblem>) {
    let parsed = CustomHeaders::parse([(name, value)]);
    assert_eq!(parsed.map(drop), expected, "{name:?}: {value:?}");
}

/// Tries to end the header and begin another, and to set headers that Hapax or the connection sets.
#[test]
fn custom_headers_cannot_change_how_a_delivery_is_read() {
    use HeaderProblem as P;
    header("authorization", "Bearer abc", Ok(()));
    header("X-Team", "billing & more; q=1", Ok(()));
    header("User-Agent", "acme/1", Ok(()));
    header("x-empty", "", Ok(()));
    for value in [
        "a\r\nhost: evil",
        "a\n",
        "\r",
        "a\0b",
        "a\tb",
        "\u{e9}",
        "\u{7f}",
        " a",
        "a ",
        "\u{1b}[0m",
    ] {
        header("x-team", value, Err(P::Value("x-team".into())));
    }
    for name in ["", " ", "a b", "a:b", ":path", "x-\u{e9}", "a\r\nb", "a\0", "(x)", "a\tb"] {
        header(name, "v", Err(P::Name(name.into())));
    }
    for name in [
        "Host",
        "host",
        "content-length",
        "Content_Length",
        "content-type",
        "transfer-encoding",
        "transfer_encoding",
        "connection",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "keep-alive",
        "proxy-authorization",
        "webhook-id",
        "webhook-signature",
        "Webhook_Timestamp",
        "hapax-fence",
        "HAPAX_FENCE",
        "idempotency-key",
        "idempotency_key",
        "x-forwarded-for",
        "forwarded",
        "x-http-method-override",
        "content-encoding",
    ] {
        let shown = name.to_ascii_lowercase();
        header(name, "v", Err(P::Reserved(shown)));
    }
    let twice = CustomHeaders::parse([("x-team", "a"), ("X_Team", "b")]);
    assert_eq!(twice, Err(P::Twice("x_team".into())));
    let names: Vec<String> = (0..33).map(|n| format!("x-{n}")).collect();
    let many = CustomHeaders::parse(names.iter().map(|name| (name.as_str(), "v")));
    assert_eq!(many, Err(P::TooMany));
    let long = "v".repeat(4_096);
    header("x-long", &long, Err(P::TooLong));
    assert!(matches!(CustomHeaders::parse([("x".repeat(129).as_str(), "v")]), Err(P::Name(_))));
}

/// Tries to replace a header that Hapax has set already, and searches the debug output for a value.
#[test]
fn custom_headers_replace_nothing_and_are_not_printed() {
    let custom = CustomHeaders::parse([("user-agent", "s3cret"), ("x-team", "s3cret")]).unwrap();
    let mut headers = HeaderMap::new();
    headers.insert("user-agent", "hapax".parse().unwrap());
    custom.add_to(&mut headers);
    assert_eq!(headers["user-agent"], "hapax");
    assert_eq!(headers["x-team"], "s3cret");
    assert!(!format!("{custom:?} {headers:?}").contains("s3cret"));
}

/// Tries proxies that would need another protocol or would show a password in the config.
#[test]
fn an_egress_proxy_is_a_host_and_a_port() {
    for text in
        ["http://egress:3128", "http://egress:3128/", "http://10.0.0.1:80", "http://[::1]:3128"]
    {
        assert!(EgressProxy::parse(text).is_ok(), "{text}");
    }
    for text in [
        "",
        "egress",
        "egress:3128",
        "http://egress",
        "https://egress:3128",
        "socks5://egress:1080",
        "http://user:pass@egress:3128",
        "http://egress:3128/path",
        "http://egress:3128/?x",
        "http://egress:0",
        "http://:3128",
    ] {
        assert!(EgressProxy::parse(text).is_err(), "{text}");
    }
}
