//! Placement: which nodes form a chain together.
//!
//! When a node dies, the nodes that share chains with it take over its reads and rebuild its
//! copies. A balanced incomplete block design makes every other node take the same share, so that
//! no single one becomes the bottleneck. The order of attack: a construction where one is known
//! ([`cyclic`]), else local search ([`search`]); then heads are dealt out evenly ([`heads`]).
//!
//! Pure and deterministic: the same nodes, numbers and seed give the same design everywhere.
//! Effort is counted in moves, not in seconds.

mod cyclic;
mod heads;
mod rng;
mod search;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use rng::Rng;

/// Most nodes of one table.
pub const NODES_MAX: usize = 2_000;
/// Most targets of one node.
pub const TARGETS_MAX: usize = 1_000;
/// Moves of the local search that a reconcile may spend: a fraction of a second.
pub const MOVES_DEFAULT: u64 = 400_000;

/// A node that may hold targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInput {
    /// Its permanent id.
    pub id: u32,
    /// Its failure domain: no chain has two targets in one.
    pub domain: String,
}

/// How good a design is known to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any two nodes of different domains share the same number of chains.
    Exact,
    /// The numbers differ; see [`Design::lambda_max`] against [`Design::lower_bound`].
    Balanced,
}

/// Chains over nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Design {
    /// For each chain its nodes, head first.
    pub groups: Vec<Vec<u32>>,
    /// How good it is.
    pub kind: Kind,
    /// Most chains that two nodes share.
    pub lambda_max: u32,
    /// Fewest chains that two nodes of different domains share.
    pub lambda_min: u32,
    /// No design of these numbers has a smaller `lambda_max`.
    pub lower_bound: u32,
    /// Moves of the local search that it took; none where a construction was known.
    pub moves: u64,
}

/// Why there is no design.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The request is outside what the solver takes.
    #[error("{what} is {value}; use {min} to {max}")]
    OutOfRange {
        /// The number.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The smallest one allowed.
        min: usize,
        /// The largest one allowed.
        max: usize,
    },
    /// The same id twice.
    #[error("node {0} is listed twice")]
    DuplicateNode(u32),
    /// Fewer domains than a chain has members.
    #[error(
        "{replicas} replicas need {replicas} failure domains, the nodes are in {domains}: add nodes in other domains or choose a finer failure domain"
    )]
    TooFewDomains {
        /// Members of a chain.
        replicas: usize,
        /// Domains that there are.
        domains: usize,
    },
    /// One domain has so many nodes that the others cannot pair with all their targets.
    #[error(
        "failure domain {domain:?} has {nodes} of {total} nodes, more than one in {replicas}: its disks could not all be used; add nodes in other domains or choose a finer failure domain"
    )]
    DomainTooLarge {
        /// The domain.
        domain: String,
        /// Its nodes.
        nodes: usize,
        /// All nodes.
        total: usize,
        /// Members of a chain.
        replicas: usize,
    },
}

/// A request whose numbers were checked, with nodes as indices `0..v` sorted by id.
#[derive(Debug)]
struct Problem {
    ids: Vec<u32>,
    /// Domain of each node, as an index.
    domain: Vec<usize>,
    domains: usize,
    /// Members of a chain.
    replicas: usize,
    /// Memberships that a node has at most.
    degree: usize,
    /// Number of chains.
    chains: usize,
}

/// Arranges `nodes` into chains of `replicas` members so that each node is in `targets_per_node`
/// chains (one fewer for some if the numbers do not divide), no chain has two nodes of one domain,
/// and the number of chains that two nodes share is as even as `moves` of search can make it.
///
/// # Errors
/// [`PlacementError`] says what to change.
pub fn design(
    nodes: &[NodeInput],
    replicas: usize,
    targets_per_node: usize,
    seed: u64,
    moves: u64,
) -> Result<Design, PlacementError> {
    let problem = Problem::new(nodes, replicas, targets_per_node)?;
    let mut rng = Rng::new(seed);
    let (groups, tried) = match cyclic::construct(&problem, &mut rng) {
        Some(groups) => (groups, 0),
        None => search::solve(&problem, &mut rng, moves),
    };
    let groups = heads::deal(&groups, problem.ids.len());
    Ok(problem.finish(&groups, tried))
}

impl Problem {
    fn new(
        nodes: &[NodeInput],
        replicas: usize,
        targets_per_node: usize,
    ) -> Result<Self, PlacementError> {
        range("the number of replicas", replicas, 1, 16)?;
        range("the number of nodes", nodes.len(), replicas, NODES_MAX)?;
        range("the number of targets per node", targets_per_node, 1, TARGETS_MAX)?;
        let by_id: BTreeMap<u32, &str> = nodes.iter().map(|n| (n.id, n.domain.as_str())).collect();
        if by_id.len() < nodes.len() {
            let mut seen = BTreeSet::new();
            let twice = nodes.iter().find(|n| !seen.insert(n.id)).map_or(0, |n| n.id);
            return Err(PlacementError::DuplicateNode(twice));
        }
        let names: BTreeSet<&str> = by_id.values().copied().collect();
        // Numbered as they first come: who shares a domain counts, not what it is called. A cluster that is made again
        // on other hosts gets the chains that its data lies in.
        let mut number: BTreeMap<&str, usize> = BTreeMap::new();
        let mut domain = Vec::with_capacity(by_id.len());
        for name in by_id.values() {
            let next = number.len();
            domain.push(*number.entry(name).or_insert(next));
        }
        check_domains(&by_id, &names, replicas)?;
        Ok(Self {
            ids: by_id.into_keys().collect(),
            domain,
            domains: names.len(),
            replicas,
            degree: targets_per_node,
            chains: nodes.len() * targets_per_node / replicas,
        })
    }

    /// Whether every node is a domain of its own, so that any two may share a chain.
    fn is_free(&self) -> bool {
        self.domains == self.ids.len()
    }

    /// Nodes of each domain.
    fn domain_sizes(&self) -> Vec<usize> {
        let mut sizes = vec![0; self.domains];
        for d in &self.domain {
            sizes[*d] += 1;
        }
        sizes
    }

    /// A node's `degree` chains have `replicas - 1` others each, spread over the nodes outside its
    /// domain: some pair shares at least the average, rounded up.
    fn lower_bound(&self) -> u32 {
        let (nodes, sizes) = (self.ids.len(), self.domain_sizes());
        // Only nodes that use all their targets are sure to reach the average.
        let full = if self.chains * self.replicas == nodes * self.degree {
            self.degree
        } else {
            self.degree - 1
        };
        let bound = |size: &usize| (full * (self.replicas - 1)).div_ceil((nodes - size).max(1));
        let bound = sizes.iter().map(bound).max().unwrap_or(0);
        u32::try_from(bound).unwrap_or(u32::MAX)
    }

    fn finish(&self, groups: &[Vec<usize>], moves: u64) -> Design {
        let overlap = search::Overlap::of(self.ids.len(), groups);
        let mut range = (u32::MAX, 0);
        for a in 0..self.ids.len() {
            for b in (0..a).filter(|b| self.domain[a] != self.domain[*b]) {
                let shared = overlap.get(a, b);
                range = (range.0.min(shared), range.1.max(shared));
            }
        }
        let (lambda_min, lambda_max) = if range.0 > range.1 { (0, 0) } else { range };
        Design {
            groups: groups.iter().map(|g| g.iter().map(|n| self.ids[*n]).collect()).collect(),
            kind: if lambda_min == lambda_max { Kind::Exact } else { Kind::Balanced },
            lambda_max,
            lambda_min,
            lower_bound: self.lower_bound(),
            moves,
        }
    }
}

fn range(what: &'static str, value: usize, min: usize, max: usize) -> Result<(), PlacementError> {
    if value < min || value > max {
        return Err(PlacementError::OutOfRange { what, value, min, max });
    }
    Ok(())
}

fn check_domains(
    by_id: &BTreeMap<u32, &str>,
    names: &BTreeSet<&str>,
    replicas: usize,
) -> Result<(), PlacementError> {
    if names.len() < replicas {
        return Err(PlacementError::TooFewDomains { replicas, domains: names.len() });
    }
    for name in names {
        let nodes = by_id.values().filter(|d| *d == name).count();
        if nodes * replicas > by_id.len() && nodes > 1 {
            let (domain, total) = ((*name).to_owned(), by_id.len());
            return Err(PlacementError::DomainTooLarge { domain, nodes, total, replicas });
        }
    }
    Ok(())
}
