//! The figures of endpoints by the hour.

use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{
    ENDPOINT_HOURS_KEPT, EndpointFigures, EndpointHistory, EndpointHour, TallyKind,
};
use uuid::Uuid;

use crate::harness::{Working, World, after};

const HOUR: i64 = 3_600;

fn endpoint(number: u128) -> EndpointId {
    EndpointId(Uuid::from_u128(number))
}

fn counted(number: u128, at: Timestamp, delivered: u64, failed: u64) -> EndpointHour {
    let mut figures =
        EndpointFigures { delivered, failed, micros: 7, ..EndpointFigures::default() };
    figures.tallies.count(TallyKind::Attempt, 40, delivered);
    figures.tallies.count(TallyKind::Attempt, 200, failed);
    EndpointHour { endpoint: endpoint(number), at, figures }
}

pub(crate) async fn the_hours_of_an_endpoint_are_added_up_over_nodes_and_end<
    S: Working + EndpointHistory,
>(
    world: World<S>,
) {
    // A node repeats a write with a larger count; another one counts the same hour.
    let [one, other] = [1, 2].map(Uuid::from_u128);
    let write = async |node: Uuid, counts: Vec<EndpointHour>| {
        world.store.record_endpoints(node, counts).await.expect("writes");
    };
    let read = async |endpoints: &[u128], from: Timestamp| {
        let endpoints = endpoints.iter().map(|number| endpoint(*number)).collect();
        let hours = world.store.endpoint_hours(endpoints, from).await.expect("reads");
        let line = |hour: &EndpointHour| {
            let EndpointFigures { delivered, failed, micros, tallies } = &hour.figures;
            assert_eq!(
                tallies.of(TallyKind::Attempt).map(|(_, count)| count).sum::<u64>(),
                delivered + failed
            );
            (hour.endpoint.0.as_u128(), hour.at, (*delivered, *failed, *micros))
        };
        hours.iter().map(line).collect::<Vec<_>>()
    };
    write(one, vec![counted(1, after(0), 1, 0), counted(2, after(5), 4, 4)]).await;
    write(one, vec![counted(1, after(70), 3, 1)]).await;
    write(other, vec![counted(1, after(3_599), 10, 0)]).await;
    world.pass(HOUR);
    write(one, vec![counted(1, after(HOUR), 5, 5)]).await;
    write(one, Vec::new()).await;
    let of_one = [(1, after(0), (13, 1, 14)), (1, after(HOUR), (5, 5, 7))];
    assert_eq!(read(&[1], after(0)).await, of_one);
    assert_eq!(read(&[1], after(HOUR - 1)).await, of_one);
    assert_eq!(read(&[1], after(HOUR + 30)).await, of_one[1..]);
    let of_two = (2, after(0), (4, 4, 7));
    assert_eq!(read(&[2, 9, 1], after(0)).await, [of_one[0], of_one[1], of_two]);
    assert_eq!(read(&[], after(0)).await, []);
    // Noon is the start of an hour: after two weeks the first hour ends.
    world.pass(ENDPOINT_HOURS_KEPT - HOUR);
    write(one, Vec::new()).await;
    assert_eq!(read(&[1], after(0)).await, of_one);
    world.pass(1);
    write(one, Vec::new()).await;
    assert_eq!(read(&[1, 2], after(0)).await, of_one[1..]);
}
