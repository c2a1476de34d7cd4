//! Ed25519 public keys, checked before use. Both the schemes of senders and JSON Web Tokens parse their
//! keys here.

use aws_lc_rs::signature::{ED25519, ParsedPublicKey};

/// Why bytes are refused as an Ed25519 public key. The message never quotes the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Ed25519KeyError {
    #[error("it is not an Ed25519 public key")]
    NotAKey,
    #[error("it is a public key of small order, for which signatures can be forged")]
    SmallOrder,
}

/// Parses a public key of 32 bytes.
///
/// Points of small order are refused, because under them one signature is valid for many messages.
/// Coordinates that are not reduced are refused too; no key generator writes them.
pub(crate) fn public_key(bytes: &[u8]) -> Result<ParsedPublicKey, Ed25519KeyError> {
    let mut y = <[u8; 32]>::try_from(bytes).map_err(|_| Ed25519KeyError::NotAKey)?;
    // The sign of x does not matter: the negative of a point has the same order.
    y[31] &= 0x7f;
    let is_reduced = !(y[0] >= 0xed && y[1..31].iter().all(|byte| *byte == 0xff) && y[31] == 0x7f);
    if !is_reduced || SMALL_ORDER.contains(&y) {
        return Err(Ed25519KeyError::SmallOrder);
    }
    ParsedPublicKey::new(&ED25519, bytes).map_err(|_| Ed25519KeyError::NotAKey)
}

/// The y coordinates of the eight points whose order divides the cofactor, little endian: order 4,
/// order 1, order 2, and the two of order 8.
const SMALL_ORDER: [[u8; 32]; 5] = [
    [0; 32],
    coordinate(1, 0, 0),
    coordinate(0xec, 0xff, 0x7f),
    [
        0xc7, 0x17, 0x6a, 0x70, 0x3d, 0x4d, 0xd8, 0x4f, 0xba, 0x3c, 0x0b, 0x76, 0x0d, 0x10, 0x67,
        0x0f, 0x2a, 0x20, 0x53, 0xfa, 0x2c, 0x39, 0xcc, 0xc6, 0x4e, 0xc7, 0xfd, 0x77, 0x92, 0xac,
        0x03, 0x7a,
    ],
    [
        0x26, 0xe8, 0x95, 0x8f, 0xc2, 0xb2, 0x27, 0xb0, 0x45, 0xc3, 0xf4, 0x89, 0xf2, 0xef, 0x98,
        0xf0, 0xd5, 0xdf, 0xac, 0x05, 0xd3, 0xc6, 0x33, 0x39, 0xb1, 0x38, 0x02, 0x88, 0x6d, 0x53,
        0xfc, 0x05,
    ],
];

const fn coordinate(first: u8, middle: u8, last: u8) -> [u8; 32] {
    let mut y = [middle; 32];
    y[0] = first;
    y[31] = last;
    y
}

/// Every encoding that must be refused: the points of small order and the coordinates that are not
/// reduced, each with both signs of x.
#[cfg(test)]
pub(crate) fn refused_keys() -> impl Iterator<Item = [u8; 32]> {
    let not_reduced = (0xed..=0xff).map(|first| coordinate(first, 0xff, 0x7f));
    SMALL_ORDER.into_iter().chain(not_reduced).flat_map(|y| {
        let mut negative = y;
        negative[31] |= 0x80;
        [y, negative]
    })
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};

    use super::*;

    // Under such a key an attacker makes one signature that is valid for any event.
    #[test]
    fn keys_of_small_order_and_unreduced_keys_are_refused() {
        assert_eq!(refused_keys().count(), 48);
        for key in refused_keys() {
            let refused = public_key(&key).map(drop);
            assert_eq!(refused, Err(Ed25519KeyError::SmallOrder), "{key:02x?}");
        }
    }

    #[test]
    fn a_generated_key_is_accepted_and_other_lengths_are_not() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let key = pair.public_key().as_ref();
        assert!(public_key(key).is_ok());
        for other in [&key[..31], &[key, &[0]].concat(), &[]] {
            assert_eq!(public_key(other).map(drop), Err(Ed25519KeyError::NotAKey));
        }
    }
}
