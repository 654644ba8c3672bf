//! Local search: a legal arrangement first, then exchanges that even out who meets whom.

use super::Problem;
use super::rng::Rng;

/// How many chains each two nodes share.
#[derive(Clone, Debug)]
pub(super) struct Overlap {
    nodes: usize,
    shared: Vec<u32>,
}

impl Overlap {
    pub(super) fn of(nodes: usize, groups: &[Vec<usize>]) -> Self {
        let mut overlap = Self { nodes, shared: vec![0; nodes * nodes] };
        for group in groups {
            for (i, a) in group.iter().enumerate() {
                for b in &group[..i] {
                    overlap.add(*a, *b);
                }
            }
        }
        overlap
    }

    pub(super) fn get(&self, a: usize, b: usize) -> u32 {
        self.shared[a * self.nodes + b]
    }

    fn add(&mut self, a: usize, b: usize) {
        self.shared[a * self.nodes + b] += 1;
        self.shared[b * self.nodes + a] += 1;
    }

    fn sub(&mut self, a: usize, b: usize) {
        self.shared[a * self.nodes + b] -= 1;
        self.shared[b * self.nodes + a] -= 1;
    }
}

/// The best arrangement that `moves` exchanges find, and how many were tried.
pub(super) fn solve(problem: &Problem, rng: &mut Rng, moves: u64) -> (Vec<Vec<usize>>, u64) {
    let groups = start(problem, rng);
    if groups.len() < 2 || problem.replicas < 2 {
        return (groups, 0);
    }
    let overlap = Overlap::of(problem.ids.len(), &groups);
    let mut state = State { problem, groups, overlap };
    let tried = state.improve(rng, moves);
    (state.groups, tried)
}

/// Fills the chains one by one: each takes the domains with the most memberships left, and in
/// each the node with the most left that has met the others least. Taking the fullest domains
/// first never strands a membership as long as no domain has more than its share.
fn start(problem: &Problem, rng: &mut Rng) -> Vec<Vec<usize>> {
    let nodes = problem.ids.len();
    let mut left = vec![problem.degree; nodes];
    let mut overlap = Overlap { nodes, shared: vec![0; nodes * nodes] };
    let mut order: Vec<usize> = (0..nodes).collect();
    let mut groups = Vec::with_capacity(problem.chains);
    for _ in 0..problem.chains {
        rng.shuffle(&mut order);
        let mut group: Vec<usize> = Vec::with_capacity(problem.replicas);
        for domain in fullest_domains(problem, &left, rng) {
            let met = |n: usize| group.iter().map(|g| overlap.get(*g, n)).sum::<u32>();
            let best = order
                .iter()
                .copied()
                .filter(|n| problem.domain[*n] == domain)
                .max_by_key(|n| (left[*n], std::cmp::Reverse(met(*n))));
            if let Some(best) = best {
                left[best] -= 1;
                group.iter().for_each(|g| overlap.add(*g, best));
                group.push(best);
            }
        }
        groups.push(group);
    }
    groups
}

fn fullest_domains(problem: &Problem, left: &[usize], rng: &mut Rng) -> Vec<usize> {
    let mut total = vec![0; problem.domains];
    for (node, domain) in problem.domain.iter().enumerate() {
        total[*domain] += left[node];
    }
    let mut order: Vec<usize> = (0..problem.domains).collect();
    rng.shuffle(&mut order);
    order.sort_by_key(|d| std::cmp::Reverse(total[*d]));
    order.truncate(problem.replicas);
    order
}

struct State<'a> {
    problem: &'a Problem,
    groups: Vec<Vec<usize>>,
    overlap: Overlap,
}

impl State<'_> {
    /// Random exchanges; one that makes the sum of squared overlaps no larger stays, a slightly
    /// worse one stays now and then, less often as the search goes on. Keeps the best found.
    /// Returns how many were tried.
    fn improve(&mut self, rng: &mut Rng, moves: u64) -> u64 {
        let bound = self.problem.lower_bound();
        let mut excess = self.excess(bound);
        let mut best = (excess, self.groups.clone());
        let mut tried = 0;
        for step in 0..moves {
            if best.0 == 0 {
                break;
            }
            tried += 1;
            // From one in eight to one in about a thousand.
            let cooling = 8 << (7 * step / moves.max(1));
            let Some(gain) = self.exchange(rng, bound, cooling) else { continue };
            excess = excess.saturating_add_signed(gain);
            if excess < best.0 {
                best = (excess, self.groups.clone());
            }
        }
        self.groups = best.1;
        tried
    }

    /// Sum over pairs of the squared overlap above `bound`.
    fn excess(&self, bound: u32) -> u64 {
        let over = |n: &u32| u64::from(n.saturating_sub(bound)).pow(2);
        self.overlap.shared.iter().map(over).sum::<u64>() / 2
    }

    /// Tries one exchange of a member of one chain for a member of another. Returns by how much
    /// the excess changed, `None` if nothing was exchanged.
    fn exchange(&mut self, rng: &mut Rng, bound: u32, cooling: usize) -> Option<i64> {
        let (ga, gb) = (rng.below(self.groups.len()), rng.below(self.groups.len()));
        let (ia, ib) = (rng.below(self.problem.replicas), rng.below(self.problem.replicas));
        let (a, b) = (self.groups[ga][ia], self.groups[gb][ib]);
        if ga == gb || a == b || !self.fits(ga, ia, b) || !self.fits(gb, ib, a) {
            return None;
        }
        let (squares, excess) = self.replace(ga, ia, b, bound);
        let (squares_b, excess_b) = self.replace(gb, ib, a, bound);
        let worse = squares + squares_b;
        let stays = worse <= 0 || (worse <= 4 && rng.once_in(cooling));
        if !stays {
            self.replace(gb, ib, b, bound);
            self.replace(ga, ia, a, bound);
            return None;
        }
        Some(excess + excess_b)
    }

    /// Whether `node` may stand at `place` of `group`: neither it nor its domain is there already.
    fn fits(&self, group: usize, place: usize, node: usize) -> bool {
        let domain = &self.problem.domain;
        let others = self.groups[group].iter().enumerate().filter(|(i, _)| *i != place);
        others.into_iter().all(|(_, n)| *n != node && domain[*n] != domain[node])
    }

    /// Puts `node` at `place` of `group`. Returns the change of the sum of squared overlaps and of
    /// the excess over `bound`.
    fn replace(&mut self, group: usize, place: usize, node: usize, bound: u32) -> (i64, i64) {
        let old = std::mem::replace(&mut self.groups[group][place], node);
        let mut change = (0, 0);
        for i in (0..self.problem.replicas).filter(|i| *i != place) {
            let other = self.groups[group][i];
            let (before, after) = (self.overlap.get(old, other), self.overlap.get(node, other));
            change.0 += 2 * i64::from(after) + 1 - (2 * i64::from(before) - 1);
            change.1 += over(after + 1, bound) - over(after, bound);
            change.1 -= over(before, bound) - over(before - 1, bound);
            self.overlap.sub(old, other);
            self.overlap.add(node, other);
        }
        change
    }
}

fn over(shared: u32, bound: u32) -> i64 {
    i64::from(shared.saturating_sub(bound)).pow(2)
}
