// All pages, in the order of the navigation. under: the page that is marked while this one is shown.
import { actor, actors } from "./pages/actors.js";
import { flame } from "./pages/flame.js";
import { groups } from "./pages/groups.js";
import { logs } from "./pages/logs.js";
import { node, nodes } from "./pages/nodes.js";
import { objects } from "./pages/objects.js";
import { overview } from "./pages/overview.js";
import { slurm } from "./pages/slurm.js";
import { functionPage, tasks } from "./pages/tasks.js";
import { timeline } from "./pages/timeline.js";
import { waits } from "./pages/waits.js";

export const PAGES = [
  { name: "overview", title: "Overview", key: "1", render: overview },
  { name: "nodes", title: "Nodes", key: "2", render: nodes },
  { name: "tasks", title: "Tasks", key: "3", render: tasks },
  { name: "actors", title: "Actors", key: "4", render: actors },
  { name: "objects", title: "Objects", key: "5", render: objects },
  { name: "timeline", title: "Timeline", key: "6", render: timeline },
  { name: "flame", title: "Stacks", key: "7", render: flame },
  { name: "waits", title: "Waits", key: "8", render: waits },
  { name: "logs", title: "Logs", key: "9", render: logs },
  { name: "groups", title: "Placement groups", key: "g", render: groups },
  { name: "slurm", title: "Slurm", key: "s", render: slurm },
  { name: "node", title: "Node", under: "nodes", render: node },
  { name: "function", title: "Function", under: "tasks", render: functionPage },
  { name: "actor", title: "Actor", under: "actors", render: actor },
];
