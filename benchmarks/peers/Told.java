import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/** What the process was told: `name=value` arguments, in the words of the benchmarks' `Spec`. */
record Told(Map<String, String> values) {
    static Told by(String[] arguments) {
        Map<String, String> values = new HashMap<>();
        for (String argument : arguments) {
            int sign = argument.indexOf('=');
            values.put(argument.substring(0, sign), argument.substring(sign + 1));
        }
        return new Told(values);
    }

    String text(String name) {
        return values.get(name);
    }

    int number(String name) {
        return Integer.parseInt(values.get(name));
    }

    double seconds(String name) {
        return Double.parseDouble(values.get(name));
    }

    /** One number for each partition. */
    int[] ends(String name) {
        return Arrays.stream(values.get(name).split(",")).mapToInt(Integer::parseInt).toArray();
    }

    /** The run over another topic that comes first and is not measured. */
    Told warmingUp() {
        Map<String, String> values = new HashMap<>(this.values);
        values.put("topic", text("warm_up"));
        values.put("ends", text("warm_up_ends"));
        values.put("group", text("group") + "-warm-up");
        values.put("records", Integer.toString(Arrays.stream(ends("warm_up_ends")).sum()));
        return new Told(values);
    }
}
