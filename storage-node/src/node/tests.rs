//! A server that is the tail of its chain, and what it makes of damaged forwards.

use chain::id::{ChainVersion, ChannelId, ClientId, InodeId, UpdateId, UpdateVersion};
use chain::replica::{Change, Content, Era, Forward as ReplicaForward, Identity};
use chain::table::{Chain, ChainTarget, PublicState};

use super::*;
use crate::engine::{ChunkInfo, IoMode, Options};

const NODE: NodeId = NodeId::new(10_001);
const CHUNK: ChunkId = ChunkId { file: InodeId::new(7), index: 0 };
const ERA: Era = Era { incarnation: 1, given_up: 0 };

/// A server that is the tail of a chain of two.
async fn tail(dir: &std::path::Path) -> (Node, Link) {
    let disk = Engine::open(&Options {
        dir: dir.to_owned(),
        cluster: "train".into(),
        node: NODE,
        io: IoMode::Auto,
        capacity_bytes: Some(1 << 20),
    });
    let node = Node::new("train".into(), NODE, 1, vec![disk.unwrap()]).unwrap();
    let (head, own) = (NodeId::new(10_002).target(0, 0), NODE.target(0, 0));
    let chain = ChainId::new(1);
    node.assign(&[TargetAssignment { target: own, chain, disk: 0 }]);
    let target = node.targets().remove(0);
    target.publish(Chain::newborn(chain, &[head, own])).await.unwrap();
    let serving = |id| ChainTarget { id, state: PublicState::Serving };
    let version = ChainVersion::new(2);
    let targets = vec![serving(head), serving(own)];
    target.publish(Chain { id: chain, version, targets }).await.unwrap();
    (node, Link { chain, chain_version: version, target: own })
}

/// The first write of a chunk, as the head has taken it from its client.
fn write(bytes: &'static [u8]) -> ReplicaForward {
    let checksum = crc32c::crc32c(bytes);
    let (client, channel) = (ClientId::new(3), ChannelId::new(0));
    ReplicaForward {
        chunk: CHUNK,
        id: UpdateId { client, channel, seq: 1 },
        identity: Identity {
            assigned: ChainVersion::new(2),
            version: UpdateVersion::new(1),
            checksum,
        },
        base: None,
        truncate_generation: 0,
        content: Content::Change(Change::Write {
            offset: 0,
            bytes: Bytes::from_static(bytes),
            checksum,
        }),
    }
}

/// One bit of what lies in a target's memory turns over.
fn flip(forward: &mut ReplicaForward) {
    let Content::Change(Change::Write { bytes, .. }) = &mut forward.content else {
        panic!("not a write");
    };
    let mut flipped = bytes.to_vec();
    flipped[2] ^= 0x20;
    *bytes = flipped.into();
}

impl Node {
    /// What the server answers to a forward of its predecessor.
    async fn answer(&self, link: &Link, forward: ReplicaForward) -> Result<(), Code> {
        let (message, payload) = convert::forward_out(link.clone(), ERA, forward);
        let peer = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
        let head = rpc::codec::Wire::to_bytes(&message);
        let call = Call { kind: Forward::KIND, head, payload, peer };
        self.handle(call).await.map(drop).map_err(|error| error.code)
    }

    fn known(&self) -> ChunkInfo {
        let target = self.targets().remove(0);
        target.engine.meta(target.id, CHUNK).unwrap()
    }
}

#[tokio::test]
async fn bytes_that_change_in_the_memory_of_a_target_are_refused_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (node, link) = tail(dir.path()).await;
    let mut flipped = write(b"some bytes");
    flip(&mut flipped);
    let refused = node.answer(&link, flipped).await;
    assert_eq!(refused, Err(Code::ChecksumMismatch));
    assert_eq!(node.known(), ChunkInfo::default());
    assert_eq!(node.answer(&link, write(b"some bytes")).await, Ok(()));
    let target = node.targets().remove(0);
    let read = target.engine.read(target.id, CHUNK, 0, 99, engine::Which::Committed).await;
    assert_eq!(&read.unwrap().bytes[..], b"some bytes");
}

#[tokio::test]
async fn bytes_that_change_after_they_were_received_are_not_made_durable() {
    let dir = tempfile::tempdir().unwrap();
    let (node, link) = tail(dir.path()).await;
    let target = node.targets().remove(0);
    let mut flipped = write(b"some bytes");
    flip(&mut flipped);
    let refused = target.forward(link.chain_version, ERA, flipped).await;
    assert_eq!(refused.unwrap_err().code, Code::ChecksumMismatch);
    assert_eq!(node.known(), ChunkInfo::default());
}

#[tokio::test]
async fn an_update_that_makes_other_bytes_here_is_refused_each_time_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (node, link) = tail(dir.path()).await;
    let mut other = write(b"some bytes");
    other.identity.checksum ^= 1;
    for _ in 0..2 {
        assert_eq!(node.answer(&link, other.clone()).await, Err(Code::DivergedChunk));
        assert_eq!(node.known(), ChunkInfo::default());
    }
    assert_eq!(node.answer(&link, write(b"some bytes")).await, Ok(()));
    assert_eq!(node.known().pending, None);
}
