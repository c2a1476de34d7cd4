//! The client address of a request, from the socket and from the headers of trusted proxies.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use http::HeaderMap;
use ipnet::IpNet;

use crate::limits::FORWARDED_HOPS_MAX;

/// The right-most address of `X-Forwarded-For` that is not a trusted proxy. If the peer is not a
/// trusted proxy, the header is ignored and the peer is the client.
pub(crate) fn remote(peer: SocketAddr, headers: &HeaderMap, trusted: &[IpNet]) -> IpAddr {
    let peer = peer.ip().to_canonical();
    let is_trusted = |address: &IpAddr| trusted.iter().any(|net| net.contains(address));
    if !is_trusted(&peer) {
        return peer;
    }
    let lines = headers.get_all("x-forwarded-for");
    let mut lines: Vec<&str> = lines.iter().filter_map(|line| line.to_str().ok()).collect();
    lines.reverse();
    let mut nearest = peer;
    for hop in lines.iter().flat_map(|line| line.rsplit(',')).take(FORWARDED_HOPS_MAX) {
        // A hop that is not an address was not written by a trusted proxy, so the hop after it is
        // the last one that can be trusted.
        let Some(address) = address(hop.trim()) else { break };
        nearest = address;
        if !is_trusted(&nearest) {
            break;
        }
    }
    nearest
}

fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address =
        bare.parse().ok().or_else(|| text.parse().ok().map(|with_port: SocketAddr| with_port.ip()));
    address.map(|address: IpAddr| address.to_canonical())
}

/// The part of an address that one client controls: a whole /64 in IPv6.
pub(crate) fn party(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6) & (!0 << 64))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(peer: &str, forwarded: &[&str], expected: &str) {
        let trusted = ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let mut headers = HeaderMap::new();
        for line in forwarded {
            headers.append("x-forwarded-for", line.parse().unwrap());
        }
        let got = remote(peer.parse().unwrap(), &headers, &trusted);
        assert_eq!(got, expected.parse::<IpAddr>().unwrap());
    }

    #[test]
    fn an_untrusted_peer_cannot_name_another_client() {
        check("203.0.113.9:1", &["198.51.100.1"], "203.0.113.9");
        check("[::ffff:203.0.113.9]:1", &[], "203.0.113.9");
    }

    #[test]
    fn behind_a_proxy_the_right_most_untrusted_hop_is_the_client() {
        check("10.0.0.1:1", &["198.51.100.1"], "198.51.100.1");
        check("10.0.0.1:1", &["1.1.1.1, 198.51.100.1, 10.2.2.2"], "198.51.100.1");
        check("10.0.0.1:1", &["1.1.1.1", "198.51.100.1, 10.2.2.2"], "198.51.100.1");
        check("10.0.0.1:1", &["198.51.100.1:4711"], "198.51.100.1");
        check("[fd00::1]:1", &["[2001:db8::1]:4711"], "2001:db8::1");
        check("10.0.0.1:1", &["[2001:db8::1]"], "2001:db8::1");
    }

    #[test]
    fn with_a_missing_or_broken_list_the_last_trusted_hop_is_the_client() {
        check("10.0.0.1:1", &[], "10.0.0.1");
        check("10.0.0.1:1", &["unknown"], "10.0.0.1");
        check("10.0.0.1:1", &["1.1.1.1, nonsense, 10.3.3.3"], "10.3.3.3");
        check("10.0.0.1:1", &["10.4.4.4, 10.3.3.3"], "10.4.4.4");
    }
}
