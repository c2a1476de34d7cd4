//! Decides whether an address belongs to the public internet. The decision is pure; [`GuardRules`]
//! combines it with the nets that the operator allows.
//!
//! [`GuardRules`]: super::GuardRules

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether `address` is a unicast address of the public internet.
///
/// Private, shared, loopback, link-local, multicast, reserved, benchmarking and documentation ranges are
/// not public. The metadata services of clouds count as private, whatever range their address is in. An
/// IPv6 address that carries an IPv4 address is judged by both.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// The IANA special-purpose registry for IPv4, and ranges that clouds added: address and prefix
/// length.
const SPECIAL_V4: &[(Ipv4Addr, u32)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8),        // this host
    (Ipv4Addr::new(10, 0, 0, 0), 8),       // private
    (Ipv4Addr::new(100, 64, 0, 0), 10),    // shared by carriers; metadata of Alibaba Cloud
    (Ipv4Addr::new(127, 0, 0, 0), 8),      // loopback
    (Ipv4Addr::new(168, 63, 129, 16), 32), // the virtual server of Azure
    (Ipv4Addr::new(169, 254, 0, 0), 16),   // link-local; metadata of most clouds
    (Ipv4Addr::new(172, 16, 0, 0), 12),    // private
    (Ipv4Addr::new(192, 0, 0, 0), 24),     // protocol assignments; metadata of Oracle Cloud
    (Ipv4Addr::new(192, 0, 2, 0), 24),     // documentation
    (Ipv4Addr::new(192, 31, 196, 0), 24),  // AS112
    (Ipv4Addr::new(192, 52, 193, 0), 24),  // AMT
    (Ipv4Addr::new(192, 88, 99, 0), 24),   // 6to4 relays, deprecated
    (Ipv4Addr::new(192, 168, 0, 0), 16),   // private
    (Ipv4Addr::new(192, 175, 48, 0), 24),  // AS112
    (Ipv4Addr::new(198, 18, 0, 0), 15),    // benchmarking
    (Ipv4Addr::new(198, 51, 100, 0), 24),  // documentation
    (Ipv4Addr::new(203, 0, 113, 0), 24),   // documentation
    (Ipv4Addr::new(224, 0, 0, 0), 4),      // multicast
    (Ipv4Addr::new(240, 0, 0, 0), 4),      // reserved, and broadcast
];

/// Ranges of 2000::/3, the only range of global unicast, that are not public.
const SPECIAL_V6: &[(Ipv6Addr, u32)] = &[
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23), // protocol assignments; Teredo, ORCHID, benchmarking
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32), // documentation
    (Ipv6Addr::new(0x2620, 0x4f, 0x8000, 0, 0, 0, 0, 0), 48), // AS112
    (Ipv6Addr::new(0x3ffe, 0, 0, 0, 0, 0, 0, 0), 16), // the former 6bone
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20), // documentation
];

fn is_public_v4(address: Ipv4Addr) -> bool {
    let bits = address.to_bits();
    !SPECIAL_V4.iter().any(|(net, length)| (bits ^ net.to_bits()) >> (32 - length) == 0)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(inside) = address.to_ipv4_mapped() {
        return is_public_v4(inside);
    }
    if let Some(inside) = nat64(address) {
        return is_public_v4(inside);
    }
    let bits = address.to_bits();
    let unicast = bits >> 125 == 0b001;
    let special =
        SPECIAL_V6.iter().any(|(net, length)| (bits ^ net.to_bits()) >> (128 - length) == 0);
    let public_inside =
        [six_to_four(address), isatap(address)].into_iter().flatten().all(is_public_v4);
    unicast && !special && public_inside
}

/// The NAT64 prefix 64:ff9b::/96, by which networks without IPv4 reach IPv4 addresses. The
/// local-use prefix 64:ff9b:1::/48 leads into networks of its operator and is never public.
fn nat64(address: Ipv6Addr) -> Option<Ipv4Addr> {
    match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(joined(high, low)),
        _ => None,
    }
}

/// 2002::/16: the IPv4 address of the router follows the prefix.
fn six_to_four(address: Ipv6Addr) -> Option<Ipv4Addr> {
    match address.segments() {
        [0x2002, high, low, ..] => Some(joined(high, low)),
        _ => None,
    }
}

/// An interface identifier of ISATAP ends in an IPv4 address, under any prefix.
fn isatap(address: Ipv6Addr) -> Option<Ipv4Addr> {
    match address.segments() {
        [.., 0 | 0x0200, 0x5efe, high, low] => Some(joined(high, low)),
        _ => None,
    }
}

fn joined(high: u16, low: u16) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low))
}
